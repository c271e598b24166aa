"""Blocks of tokens joined, and cut short, without being decoded: what a cache that grows token by token needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvlab.codecs.base import Codec, Encoded, Site, stored
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.shared.seeding import generator

PROBE = (2, 3)  # tokens of the two pieces that must make up the whole


class Joiner(Protocol):
    """Joins and cuts tensors that a codec coded as one block each, to what it would have made of them itself."""

    def fits(self, encoded: Encoded) -> bool:
        """Whether this one can be joined and cut."""

    def join(self, first: Encoded, rest: Encoded) -> Encoded:
        """The tokens of both."""

    def cut(self, encoded: Encoded, tokens: int) -> Encoded:
        """The first tokens."""


def joiner(codec: Codec, site: Site, heads: int, head_dim: int) -> Joiner | None:
    """The joiner of a codec for one site; None when its blocks cannot be joined.

    Finds out by coding a few random tokens, which also shows whether the calibration fits the site.

    Raises
    ------
    CalibrationMismatch
        It does not.
    """
    x = torch.randn(
        heads, sum(PROBE), head_dim, generator=generator("joiner", site.layer, site.stream), dtype=torch.float32
    )
    whole, first, rest = [codec.encode(part, site) for part in (x, *x.split(PROBE, dim=1))]
    if not codec.per_token:
        return None
    return SymbolJoiner(codec) if isinstance(codec, KltCodec) else layout_of(whole, first, rest)


class SymbolJoiner:
    """Blocks of `KltCodec`, whose bytes hold digits of several tokens: unpacked, joined or cut, packed again."""

    def __init__(self, codec: KltCodec):
        self.codec = codec

    def fits(self, encoded: Encoded) -> bool:
        """Whether it is one block."""
        return len(encoded.blocks) == 1

    def join(self, first: Encoded, rest: Encoded) -> Encoded:
        """See `Joiner`."""
        symbols = torch.cat([self._symbols(first), self._symbols(rest)], dim=2)
        return replace(self._packed(first, symbols), stats=first.stats + rest.stats)

    def cut(self, encoded: Encoded, tokens: int) -> Encoded:
        """See `Joiner`."""
        return self._packed(encoded, self._symbols(encoded)[:, :, :tokens].contiguous())

    def _planes(self, encoded: Encoded) -> Planes:
        return self.codec.plan(encoded.layer, encoded.shape, encoded.blocks[0][0].device).planes

    def _symbols(self, encoded: Encoded) -> Tensor:
        """uint8 [1, rows, tokens]."""
        planes, tokens = self._planes(encoded), encoded.shape[1]
        (data,) = stored(encoded.blocks[0], (torch.uint8, (planes.bytes(tokens),)))
        return planes.unpack(data[None], tokens)

    def _packed(self, like: Encoded, symbols: Tensor) -> Encoded:
        heads, _, head_dim = like.shape
        data = self._planes(like).pack(symbols)[0]
        return replace(like, shape=(heads, symbols.shape[2], head_dim), blocks=((data,),))


@dataclass(frozen=True)
class Strand:
    """Where the tokens lie in one of a block's arrays.

    Along `axis` the array is `lead` runs of `step` entries per token: 1 when the tokens lie one after
    the other, the number of heads when the codec packs head by head.
    """

    axis: int
    lead: int
    step: int

    def join(self, first: Tensor, rest: Tensor) -> Tensor:
        """The first array's tokens, then the second's."""
        runs = torch.cat([self._runs(first), self._runs(rest)], dim=self.axis + 1)
        return runs.flatten(self.axis, self.axis + 1)

    def cut(self, array: Tensor, tokens: int) -> Tensor:
        """The first `tokens` tokens."""
        return self._runs(array).narrow(self.axis + 1, 0, tokens * self.step).flatten(self.axis, self.axis + 1).clone()

    def length(self, tokens: int) -> int:
        """Entries along the axis for so many tokens."""
        return self.lead * self.step * tokens

    def _runs(self, array: Tensor) -> Tensor:
        return array.unflatten(self.axis, (self.lead, -1))


@dataclass(frozen=True)
class Layout:
    """Where the tokens lie in all of a block's arrays: a strand, or an array that is the same in every block."""

    parts: tuple[Strand | Tensor, ...]

    def fits(self, encoded: Encoded) -> bool:
        """Whether this block's arrays lie so."""
        found = arrays_of(encoded)
        return len(found) == len(self.parts) and all(
            array.shape[part.axis] == part.length(encoded.shape[1])
            if isinstance(part, Strand)
            else array.shape == part.shape and torch.equal(array.cpu(), part)
            for array, part in zip(found, self.parts, strict=True)
        )

    def join(self, first: Encoded, rest: Encoded) -> Encoded:
        """Both blocks as one, without decoding either."""
        heads, tokens, head_dim = first.shape
        joined = [
            part.join(a, b) if isinstance(part, Strand) else a
            for a, b, part in zip(arrays_of(first), arrays_of(rest), self.parts, strict=True)
        ]
        shape = (heads, tokens + rest.shape[1], head_dim)
        return replace(refilled(first, joined), shape=shape, stats=first.stats + rest.stats)

    def cut(self, encoded: Encoded, tokens: int) -> Encoded:
        """The first `tokens` tokens, without decoding them."""
        heads, _, head_dim = encoded.shape
        short = [
            part.cut(array, tokens) if isinstance(part, Strand) else array
            for array, part in zip(arrays_of(encoded), self.parts, strict=True)
        ]
        return replace(refilled(encoded, short), shape=(heads, tokens, head_dim))


def arrays_of(encoded: Encoded) -> list[Tensor]:
    """The stored arrays, the shared ones first."""
    return [*encoded.shared, *(array for block in encoded.blocks for array in block)]


def refilled(encoded: Encoded, arrays: list[Tensor]) -> Encoded:
    """`encoded` with other arrays in the same places."""
    source: Iterator[Tensor] = iter(arrays)
    shared, *blocks = [tuple(next(source) for _ in old) for old in (encoded.shared, *encoded.blocks)]
    return replace(encoded, shared=shared, blocks=tuple(blocks))


def layout_of(whole: Encoded, first: Encoded, rest: Encoded) -> Layout | None:
    """The layout of a codec that codes tokens one by one; None when the pieces do not make up the whole.

    Parameters
    ----------
    whole, first, rest : Encoded
        Some tokens coded together, and the same tokens coded in two pieces.
    """
    if len({len(arrays_of(encoded)) for encoded in (whole, first, rest)}) != 1:
        return None
    parts = []
    for array, a, b in zip(arrays_of(whole), arrays_of(first), arrays_of(rest), strict=True):
        if same(array, a) and same(array, b):
            parts.append(array.cpu())
            continue
        strands = candidates(array, a, heads=whole.shape[0], tokens=(whole.shape[1], first.shape[1]))
        fitting = [strand for strand in strands if same(strand.join(a, b), array)]
        if not fitting:
            return None
        parts.append(fitting[0])
    layout = Layout(tuple(parts))
    return layout if all(map(layout.fits, (whole, first, rest))) else None


def candidates(array: Tensor, piece: Tensor, heads: int, tokens: tuple[int, int]) -> list[Strand]:
    """How the tokens may lie in an array that has these many, given a piece of it that has those many."""
    grown = [axis for axis, (n, m) in enumerate(zip(array.shape, piece.shape, strict=True)) if n != m]
    if len(grown) != 1:
        return []
    n, m = array.shape[grown[0]], piece.shape[grown[0]]
    return [
        Strand(grown[0], lead, n // (tokens[0] * lead))
        for lead in sorted({1, heads})
        if n % (tokens[0] * lead) == 0 and n * tokens[1] == m * tokens[0]
    ]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and numbers."""
    return a.dtype == b.dtype and torch.equal(a, b)

"""Codes the K and V of a whole cache, layer after layer, each predicted from what a decoder will have of the one below.

A cache is cut into blocks of tokens, which decode alone. The encoder goes up the layers once and holds two of them; the
decoder does the same with the same whole numbers (`exact`), so that both have the same below every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from kvlab.codecs.archive.exact import off_grid, on_grid
from kvlab.codecs.archive.layer import LayerCoder, coarser
from kvlab.codecs.archive.model import STREAMS, ArchiveModel, spectrum_at
from kvlab.codecs.archive.steps import OCTAVE, QUALITIES, exponents
from kvlab.codecs.archive.symbols import Coder, Exponents, Symbols, packed, unpacked
from kvlab.codecs.base import all_finite
from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite, StreamError, UserError

TRIES = 12  # encodings at most until a cache has the bits that were asked for
NEAR = 0.004  # relative; what is asked for is met within 1 %

First = Callable[[Sequence[int]], tuple[Tensor, Tensor]]
"""K and V of the first layer by token ids; `tokens.FirstLayer.rows`."""
Part = tuple[Tensor, Tensor]
"""Indices of K or V and their classes, [tokens, width] each."""


@dataclass(frozen=True)
class ArchiveBody:
    """A coded cache without its frame.

    Parameters
    ----------
    quality : int
        64ths of an octave; each octave halves the step.
    tokens, block : int
        All of them, and those of a block.
    starts : bool
        Whether the first token is the first of its text.
    records : tuple of tuple of bytes
        By block and layer.
    """

    quality: int
    tokens: int
    block: int
    starts: bool
    records: tuple[tuple[bytes, ...], ...]

    @property
    def nbytes(self) -> int:
        """Of all records."""
        return sum(len(part) for record in self.records for part in record)

    def span(self, number: int) -> slice:
        """The tokens of a block."""
        return spans_of(self.tokens, self.block)[number]


class ArchiveCodec:
    """Encodes and decodes whole caches.

    Parameters
    ----------
    fitted : ArchiveModel
        Its calibration.
    first : callable or None
        What the first layer holds by the token ids; needed where the calibration was fitted with it.
    block : int
        Tokens that decode without the others.
    """

    def __init__(self, fitted: ArchiveModel, first: First | None, block: int = 128):
        if fitted.by_tokens and first is None:
            raise CapabilityError("this calibration takes the first layer from the token ids, and no model is given")
        self.fitted, self.block = fitted, block
        self._first = first if fitted.by_tokens else None
        self._symbols = [Symbols(counts) for counts in fitted.counts]
        self._exponents = [Exponents(counts) for counts in fitted.exponents]
        self._coders: dict[tuple[int, int, int], LayerCoder] = {}
        self._lock = Lock()

    @torch.no_grad()
    def encode(
        self,
        cache: Mapping[tuple[int, str], Tensor],
        ids: Sequence[int],
        expected: Tensor,
        quality: int,
        starts: bool = True,
    ) -> ArchiveBody:
        """Code a cache at a quality.

        Parameters
        ----------
        cache : mapping
            By layer and stream, K before its rotary embedding, float [kv_heads, tokens, head_dim].
        ids : sequence of int
            Its tokens.
        expected : Tensor
            Squared attention that each token may expect in each layer [layers, tokens]; see `steps.exponents`.
        quality : int
            See `ArchiveBody`.
        starts : bool
            Whether the first token is the first of its text.

        Raises
        ------
        NonFinite
            A value is NaN or infinite.
        UserError
            Ids, attention and cache are of different lengths, or the quality is out of range.
        CalibrationMismatch
            The cache is not of the calibration's layers, heads and dimensions.
        """
        if quality not in QUALITIES:
            raise UserError(
                f"quality {quality} is out of range; allowed: {QUALITIES.start}..{QUALITIES[-1]}",
                code="user.out-of-range",
            )
        tokens = cache[0, "k"].shape[1]
        self._refuse_other_shape(cache, tokens)
        if len(ids) != tokens or tuple(expected.shape) != (self.fitted.layers, tokens):
            raise UserError(
                f"a cache of {tokens} tokens comes with {len(ids)} token ids and attention of shape"
                f" {list(expected.shape)}, for {self.fitted.layers} layers",
                code="user.other-length",
            )
        walk, chosen = _LayerWalk(self, self.given(ids), quality, starts), exponents(expected.cpu())
        spans = spans_of(tokens, self.block)
        records: list[list[bytes]] = [[] for _ in spans]
        for layer in range(self.fitted.layers):
            rows = [_rows(cache[layer, stream], layer, stream) for stream in STREAMS]
            exponent, parts = walk.analysed(layer, rows, chosen[layer])
            for record, span in zip(records, spans, strict=True):
                record.append(self._written(layer, exponent, parts, span))
        return ArchiveBody(quality, tokens, self.block, starts, tuple(map(tuple, records)))

    def encode_to(self, cache, ids, expected, nbytes: float, beside: int = 0, starts: bool = True) -> ArchiveBody:
        """Code a cache into as nearly as many bytes as are asked for, and no more than 1 % off.

        Bits are nearly straight in the quality, so that a few encodings find it. `beside` are bytes that whoever asks
        adds to the records; the other parameters are those of `encode`.

        Raises
        ------
        CapabilityError
            No quality comes near.
        """
        tried: dict[int, ArchiveBody] = {}
        due = nbytes - beside
        quality = self.fitted.quality_for(8 * due / sum(x.numel() for x in cache.values()))
        while quality not in tried and quality in QUALITIES and len(tried) < TRIES:
            tried[quality] = self.encode(cache, ids, expected, quality, starts)
            if abs(tried[quality].nbytes - due) > NEAR * nbytes:
                quality = _next(tried, due, sum(x.numel() for x in cache.values()))
        best = min(tried.values(), key=lambda one: abs(one.nbytes - due), default=None)
        if best is None or abs(best.nbytes - due) > 0.01 * nbytes:
            nearest = f"the nearest are {best.nbytes + beside}, at quality {best.quality}" if best else "none are near"
            raise CapabilityError(
                f"{nbytes:.0f} bytes cannot be met within 1 %: {nearest}", code="capability.unmet-bits"
            )
        return best

    @torch.no_grad()
    def decode(
        self, body: ArchiveBody, ids: Sequence[int], only: int | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Layer, K and V, float32 [kv_heads, tokens, head_dim], from the first layer up; two are held at a time.

        With several threads, what is read of the next one too.

        Parameters
        ----------
        ids : sequence of int
            All tokens of the cache.
        only : int, optional
            One block, whose tokens alone are given.

        Raises
        ------
        StreamError
            A record is none of this calibration.
        """
        numbers = range(len(body.records)) if only is None else [block_of(body, only)]
        spans = [body.span(number) for number in numbers]
        tokens = [token for span in spans for token in ids[span]]
        with one_ahead(lambda layer: self._read(layer, body, numbers), self.fitted.layers) as read:
            walk = _LayerWalk(self, self.given(tokens), body.quality, body.starts and 0 in numbers)
            for layer, grids in enumerate(read):
                k, v = (self._tensor(layer, place, x) for place, x in walk.synthesised(layer, grids))
                yield layer, k, v

    def given(self, ids: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """K and V of the first layer, where the token ids say them."""
        return self._first(ids) if self._first else None

    def _refuse_other_shape(self, cache: Mapping[tuple[int, str], Tensor], tokens: int) -> None:
        expected = {at: (fitted.heads, tokens, fitted.first.shape[1]) for at, fitted in self.fitted.streams.items()}
        found = {at: tuple(x.shape) for at, x in cache.items()}
        if found != expected:
            layer, stream = min(at for at in expected.keys() | found.keys() if expected.get(at) != found.get(at))
            raise CalibrationMismatch(
                f"layer {layer} {stream} of the cache has shape {found.get((layer, stream))}, and the calibration is"
                f" for {expected.get((layer, stream))}; calibrate this model",
                code="calibration.other-shape",
            )

    def _tensor(self, layer: int, place: int, rows: Tensor) -> Tensor:
        fitted = self.fitted.streams[layer, STREAMS[place]]
        return off_grid(rows, int(fitted.unit)).unflatten(1, (fitted.heads, -1)).transpose(0, 1)

    def _written(self, layer: int, exponent: Tensor, parts: list[Part], span: slice) -> bytes:
        coder = Coder()
        for place in (1, 0):  # a stack: what is read first is written last
            index, found = (part[span] for part in parts[place])
            self._symbols[place].write(coder, index, found)
        self._exponents[layer].write(coder, exponent[span])
        return packed(coder)

    def _read(self, layer: int, body: ArchiveBody, numbers: Sequence[int]) -> list[Tensor]:
        """Components of the tokens of some blocks on their grid, of K and of V; nothing of another layer is read."""
        coders = [unpacked(body.records[number][layer]) for number in numbers]
        sizes = [span.stop - span.start for span in map(body.span, numbers)]
        table, grids = self._exponents[layer], []
        exponent = torch.cat([table.read(coder, size) for coder, size in zip(coders, sizes, strict=True)])
        for place, symbols in enumerate(self._symbols):
            stream = self.coder(layer, place, body.quality)
            found = stream.classes(exponent)
            read = [symbols.read(coder, own) for coder, own in zip(coders, found.split(sizes), strict=True)]
            grids.append(stream.grid(torch.cat(read), exponent, found))
        for number, coder in zip(numbers, coders, strict=True):
            if not coder.is_empty():
                raise StreamError(f"layer {layer} of block {number} holds more than the tokens of its block")
        return grids

    def coder(self, layer: int, place: int, quality: int) -> LayerCoder:
        """That of a stream at a quality; the last few are kept. Threads may ask at the same time."""
        key = (layer, place, quality)
        with self._lock:
            if key not in self._coders:
                if len(self._coders) >= 3 * len(STREAMS):
                    self._coders.pop(next(iter(self._coders)))
                fitted = self.fitted.streams[layer, STREAMS[place]]
                points = self.fitted.points[place]
                self._coders[key] = LayerCoder(fitted, quality, spectrum_at(fitted, quality), points)
            return self._coders[key]


class _LayerWalk:
    """Goes up the layers, and holds what is decoded of the one below; whole numbers, float64 [tokens, width]."""

    def __init__(self, codec: ArchiveCodec, given: tuple[Tensor, Tensor] | None, quality: int, starts: bool):
        self.codec, self.given, self.quality, self.starts = codec, given, quality, starts
        self._below: list[Tensor] = []

    def analysed(self, layer: int, rows: list[Tensor], exponent: Tensor) -> tuple[Tensor, list[Part]]:
        """Exponents, and indices and their classes of K and of V; exponents are coarser where indices would not fit."""
        while True:
            own: list[Tensor] = []
            parts = []
            for place, values in enumerate(rows):
                coder = self.codec.coder(layer, place, self.quality)
                predicted = self._predicted(layer, place, own, len(values))
                index = coder.indices(coder.components(on_grid(values, coder.unit) - predicted), exponent)
                fitting = coarser(index, exponent)
                if not torch.equal(fitting, exponent):
                    break
                found = coder.classes(exponent)
                parts.append((index, found))
                own.append(coder.rebuilt(coder.grid(index, exponent, found), predicted))
            else:
                self._below = own
                return exponent, parts
            exponent = fitting

    def synthesised(self, layer: int, grids: list[Tensor]) -> list[tuple[int, Tensor]]:
        """K and V of the next layer up, each with its place, from their components on the grid."""
        own: list[Tensor] = []
        for place, grid in enumerate(grids):
            coder = self.codec.coder(layer, place, self.quality)
            own.append(coder.rebuilt(grid, self._predicted(layer, place, own, len(grid))))
        self._below = own
        return list(enumerate(own))

    def _predicted(self, layer: int, place: int, own: list[Tensor], rows: int) -> Tensor:
        given = self.given[place] if self.given and layer == 0 else None
        return self.codec.coder(layer, place, self.quality).predicted(self._below + own, rows, self.starts, given)


def spans_of(tokens: int, block: int) -> list[slice]:
    """The tokens of each block."""
    return [slice(start, min(start + block, tokens)) for start in range(0, tokens, block)]


def block_of(body: ArchiveBody, number: int) -> int:
    """`number`, which must be that of a block; `UserError` otherwise."""
    if not 0 <= number < len(body.records):
        raise UserError(f"there is no block {number}; allowed: 0..{len(body.records) - 1}", code="user.no-such-block")
    return number


def _rows(x: Tensor, layer: int, stream: str) -> Tensor:
    """[heads, tokens, head_dim] with heads joined, float64 [tokens, width]; `NonFinite` names layer and stream."""
    if not all_finite(x):
        raise NonFinite(f"layer {layer} {stream}: NaN or infinity cannot be archived")
    return x.detach().cpu().double().transpose(0, 1).flatten(1)


def _next(tried: Mapping[int, ArchiveBody], nbytes: float, values: int) -> int:
    """The quality to try next: between the nearest that give less and more, or beyond all; at last one tried before."""
    less = max((quality for quality, body in tried.items() if body.nbytes < nbytes), default=None)
    more = min((quality for quality, body in tried.items() if body.nbytes > nbytes), default=None)
    if less is None or more is None:
        quality = more if less is None else less
        octaves = (nbytes - tried[quality].nbytes) * 8 / values  # an octave is at most a bit of every value
        step = round(1.25 * OCTAVE * octaves)
        return quality + (step or (1 if less is not None else -1))
    if abs(more - less) < 2:
        return less
    share = (nbytes - tried[less].nbytes) / (tried[more].nbytes - tried[less].nbytes)
    return min(max(less + round(share * (more - less)), min(less, more) + 1), max(less, more) - 1)


# Reads one layer ahead: while a layer is rebuilt, another thread takes the next one's indices off the stream.

T = TypeVar("T")


@contextmanager
def one_ahead(read: Callable[[int], T], count: int) -> Iterator[Iterator[T]]:
    """What ``read(0)``, ``read(1)``, ... give, each read while the one before is used.

    One is held beside the one in use. Torch has one thread fewer while the context is open, since the reading has one;
    where it has only one, all is done in turn. Where the context ends early, the reading that has begun is waited for.

    Parameters
    ----------
    read : callable
        Takes a number; calls for different ones share nothing that either changes.
    count : int
        How many there are, at least one.
    """
    threads = torch.get_num_threads()
    if threads < 2:
        yield map(read, range(count))
        return
    torch.set_num_threads(threads - 1)
    try:
        with ThreadPoolExecutor(1) as pool:
            yield _results(pool, read, count, pool.submit(read, 0))
    finally:
        torch.set_num_threads(threads)


def _results(pool: ThreadPoolExecutor, read: Callable[[int], T], count: int, coming: Future[T]) -> Iterator[T]:
    for number in range(count):
        found = coming.result()
        if number + 1 < count:
            coming = pool.submit(read, number + 1)
        yield found

"""What a decode step's queries say of each chunk, from a small summary of the chunk's keys.

A summary is made of a payload's bits by elementwise operations alone, in an order that is fixed here. Each of
them is rounded as IEEE 754 says, so a summary made from the pool and one made from bytes on a disk are the same
bits, on every device.

Summaries and seeds are filed under the chunk's identity, the hash of all tokens up to its end. What another
request left behind cannot be met under the index of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvlab.codecs.stream.packing import pack, unpack
from kvlab.core.errors import LayoutMismatch, NonFinite
from kvlab.kvstore.paging.geometry import Geometry, K
from kvlab.kvstore.paging.ledger import Ledger

EPS = 1e-6  # a key or a query shorter than this has no direction
MISSING = -2.0  # below every score there is, so that a chunk without keys outranks none that has them
AT_ONCE = 1 << 20  # products held at a time while scoring

ChunkLink = bytes  # of the token chain: the hash of the tokens of a chunk and of all before them


class KeySummary(Protocol):
    """How the K rows of a chunk are summarised."""

    name: str

    def make(self, keys: Tensor) -> Tensor:
        """What is kept of finite [layers, kv_heads, chunk_tokens, head_dim]."""
        ...

    def unit(self, kept: Tensor, head_dim: int) -> Tensor:
        """The directions in it, float32 [layers, kv_heads, n, head_dim], each of length 1 or 0."""
        ...


class Mean:
    """The direction of the mean key of each layer and head: the sum of the rows, divided by its length."""

    name = "mean"

    def make(self, keys: Tensor) -> Tensor:
        """float32 [layers, kv_heads, 1, head_dim]."""
        return unit(pairwise_sum(keys.double(), dim=-2))[:, :, None]

    def unit(self, kept: Tensor, head_dim: int) -> Tensor:
        """As it is kept."""
        return kept


class Signs:
    """The sign of every number of every key: a corner of the cube for each row."""

    name = "signs"

    def make(self, keys: Tensor) -> Tensor:
        """uint8 [layers, kv_heads, chunk_tokens, ceil(head_dim / 8)], a 1 for each negative number."""
        return pack(torch.signbit(keys), 1)

    def unit(self, kept: Tensor, head_dim: int) -> Tensor:
        """+-head_dim**-0.5 for every number."""
        return (1 - 2 * unpack(kept, 1, head_dim).float()) * head_dim**-0.5


MEAN, SIGNS = Mean(), Signs()


@dataclass(frozen=True)
class Rebuilt:
    """Where the chunks of a restored chain get their scores from.

    Attributes
    ----------
    from_keys, from_seed, missing : int
        Chunks whose keys were summarised; whose keys could not be, but the ledger had a score; neither.
    """

    from_keys: int
    from_seed: int
    missing: int


class Scorer:
    """Summaries of sealed chunks, and the scores of chunks by them.

    Parameters
    ----------
    geometry : Geometry
        Of the payloads.
    summary : KeySummary
        `MEAN` for the mean key of a chunk, `SIGNS` for the signs of all its keys.
    """

    def __init__(self, geometry: Geometry, summary: KeySummary = MEAN):
        self.geometry, self.summary = geometry, summary
        self.keys: dict[ChunkLink, Tensor] = {}
        self.seeds: dict[ChunkLink, float] = {}

    def add(self, identity: ChunkLink, payload: Tensor) -> bool:
        """Summarise a sealed chunk, in place of what was known under this identity.

        Parameters
        ----------
        identity : bytes
            Hash of the chunk's tokens and of all before them.
        payload : Tensor
            Of the geometry's shape and dtype, on any device.

        Returns
        -------
        bool
            False when a key is NaN or infinite; the chunk then counts as one without keys.

        Raises
        ------
        LayoutMismatch
            When the payload is of another shape or dtype.
        """
        self.geometry.check_chunk(payload)
        self.keys.pop(identity, None)
        self.seeds.pop(identity, None)
        keys = payload[:, K]
        if not bool(torch.isfinite(keys).all()):
            return False
        self.keys[identity] = self.summary.make(keys).cpu()
        return True

    def keep(self, chain: Iterable[ChunkLink]) -> None:
        """Forget every chunk that is not of this chain."""
        kept = set(chain)
        self.keys = {identity: key for identity, key in self.keys.items() if identity in kept}
        self.seeds = {identity: seed for identity, seed in self.seeds.items() if identity in kept}

    def rebuild(
        self, chain: Sequence[ChunkLink], payloads: Iterable[Tensor | None], ledger: Ledger | None = None
    ) -> Rebuilt:
        """Forget everything, and know a restored chain.

        Parameters
        ----------
        chain : sequence of bytes
            Link of each sealed chunk.
        payloads : iterable of Tensor or None
            Their payloads in logical order; None, or no more payloads, where there is none.
        ledger : Ledger or None
            Its scores stand in where a chunk's keys cannot be summarised; it may end before the chain does.

        Returns
        -------
        Rebuilt
            How many came from where.

        Raises
        ------
        LayoutMismatch
            When a payload is of another shape or dtype, or there are more payloads than chunks. The scorer then
            knows nothing.
        """
        self.keep(())
        for chunk, payload in enumerate(payloads):
            if chunk >= len(chain):
                self.keep(())
                raise LayoutMismatch(
                    f"the chain names {len(chain)} chunks, and there are more payloads than these",
                    code="layout.payload-count",
                )
            if payload is not None:
                self.add(chain[chunk], payload)
        self._seed(chain, ledger)
        known = len(self.keys), len(self.seeds)
        return Rebuilt(*known, missing=len(chain) - sum(known))

    def _seed(self, chain: Sequence[ChunkLink], ledger: Ledger | None) -> None:
        for chunk, identity in enumerate(chain):
            score = ledger.entry(chunk).score if ledger else None
            if identity not in self.keys and score is not None:
                self.seeds[identity] = score

    def scores(self, queries: Tensor, chain: Sequence[ChunkLink]) -> list[float]:
        """How well the queries fit each chunk.

        The mean over layers of the best fit of a layer: max over query heads and directions of the chunk of
        q_hat . k_hat, each query head against its own KV head.

        Parameters
        ----------
        queries : Tensor
            [layers, q_heads, head_dim] of one position; q_heads is a multiple of kv_heads.
        chain : sequence of bytes
            Link of each sealed chunk.

        Returns
        -------
        list of float
            In [-1, 1] but for rounding. A chunk without keys has its seed, or else -2.

        Raises
        ------
        LayoutMismatch
            When the queries do not fit the geometry.
        NonFinite
            When a query is NaN or infinite.
        """
        known = [identity for identity in chain if identity in self.keys]
        fits = self._fits(self._grouped(queries), known)
        fit = dict(zip(known, fits, strict=True))
        return [fit.get(identity, self.seeds.get(identity, MISSING)) for identity in chain]

    def _grouped(self, queries: Tensor) -> Tensor:
        """Unit queries, float32 [layers, kv_heads, group, head_dim]."""
        layers, heads, dim = self.geometry.layers, self.geometry.kv_heads, self.geometry.head_dim
        shape = tuple(queries.shape)
        if len(shape) != 3 or (shape[0], shape[2]) != (layers, dim) or shape[1] % heads or not shape[1]:
            raise LayoutMismatch(
                f"queries are [{layers}, a multiple of {heads}, {dim}] for this model; given was {list(shape)}",
                code="layout.queries",
            )
        if not bool(torch.isfinite(queries).all()):
            raise NonFinite("a query is NaN or infinite; no chunk can be scored by it", code="non-finite.query")
        return unit(queries.cpu()).unflatten(1, (heads, -1))

    def _fits(self, queries: Tensor, known: Sequence[ChunkLink]) -> list[float]:
        """Scores of chunks that have keys, a few chunks at a time."""
        if not known:
            return []
        directions, fits = self.keys[known[0]].shape[-2], []
        step = max(1, AT_ONCE // (queries.numel() * directions))
        for first in range(0, len(known), step):
            kept = torch.stack([self.keys[identity] for identity in known[first : first + step]])
            fits += fit(queries, self.summary.unit(kept, self.geometry.head_dim)).tolist()
        return fits


def fit(queries: Tensor, keys: Tensor) -> Tensor:
    """Mean over layers of the largest q . k.

    Parameters
    ----------
    queries : Tensor
        float32 [layers, kv_heads, group, head_dim].
    keys : Tensor
        float32 [chunks, layers, kv_heads, n, head_dim].

    Returns
    -------
    Tensor
        float32 [chunks]; that of a chunk does not depend on which others there are.
    """
    dots = pairwise_sum(queries[None, :, :, :, None] * keys[:, :, :, None], dim=-1)
    best = dots.flatten(2).amax(-1)
    return pairwise_sum(best, dim=-1) / best.shape[-1]


def unit(x: Tensor) -> Tensor:
    """Vectors along the last axis, divided by their length, or by `EPS` where that is longer.

    In float64, where no square of a float32 overflows; the result is float32.
    """
    x = x.double()
    return (x / pairwise_sum(x * x, dim=-1).sqrt().clamp_min(EPS)[..., None]).float()


def pairwise_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over a negative axis, of pairs, then of pairs of those sums, and so on.

    Only elementwise additions, in an order that depends on nothing but the length of the axis (Higham 1993,
    "The accuracy of floating point summation", SIAM J. Sci. Comput. 14, section 3).
    """
    while (n := x.shape[dim]) > 1:
        halves = x.narrow(dim, 0, n // 2) + x.narrow(dim, n // 2, n // 2)
        x = halves if n % 2 == 0 else torch.cat([halves, x.narrow(dim, n - 1, 1)], dim)
    return x.squeeze(dim)

"""Which chunks stay in the pool: one small class a policy, behind one interface.

A policy ranks a chunk from what the ledger stores of it, and from nothing else: a pager that was saved and
restored evicts what it would have evicted anyway. Policies that look at the data turn what a decode step
shows (`AttentionSeen`) into scores, which the pager writes into the ledger.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvlab.core.errors import CapabilityError, UnknownName
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import ChunkEntry
from kvlab.kvstore.paging.scorer import MEAN, SIGNS, ChunkLink, Scorer


@dataclass(frozen=True)
class AttentionSeen:
    """What one decode step shows of the sealed chunks; a policy takes of it what it needs.

    Parameters
    ----------
    queries : Tensor or None
        [layers, q_heads, head_dim], after the rotary embedding, in the basis of the stored K.
    chain : sequence of bytes
        Link of each sealed chunk: the hash of all its tokens and of those before it.
    mass : sequence of float or None
        Attention mass that each sealed chunk really has; only the oracle may look at it.
    """

    queries: Tensor | None = None
    chain: Sequence[ChunkLink] = ()
    mass: Sequence[float] | None = None


class Policy(Protocol):
    """Who stays.

    Attributes
    ----------
    name : str
    needs : tuple of str
        Fields of `AttentionSeen` that `scores` reads beside the chain; empty for a policy that does not look.
    """

    name: str
    needs: tuple[str, ...]

    def rank(self, chunk: int, entry: ChunkEntry) -> float:
        """The higher, the longer a chunk stays; of equals the first one goes."""
        ...

    def scores(self, seen: AttentionSeen) -> list[float] | None:
        """A score for each sealed chunk, for `Pager.set_scores`; None from a policy that has none."""
        ...


class Lru:
    """The chunk that was asked for longest ago goes first.

    As decoding asks for none but the newest, this is a window of recent chunks after the sinks
    (StreamingLLM, Xiao et al. 2024, arXiv 2309.17453, section 3.2).
    """

    name = "lru"
    needs = ()

    def rank(self, chunk: int, entry: ChunkEntry) -> float:
        """The clock at its last use."""
        return entry.last_use

    def scores(self, seen: AttentionSeen) -> None:
        """None: it does not look."""


class Random:
    """A uniformly random set of the chunks, as the control that knows nothing.

    Every chunk draws one number, and the highest stay: a reservoir sample of all chunks so far (Efraimidis and
    Spirakis 2006, Information Processing Letters 97, with equal weights) that changes no more than it has to.

    Parameters
    ----------
    seed : int
    """

    name = "random"
    needs = ()

    def __init__(self, seed: int = 0):
        self.seed = seed

    def rank(self, chunk: int, entry: ChunkEntry) -> float:
        """Its number, in [0, 1); a function of the seed and the chunk."""
        digest = hashlib.sha256(f"{self.seed}:{chunk}".encode()).digest()
        return int.from_bytes(digest[:6], "little") / 2**48

    def scores(self, seen: AttentionSeen) -> None:
        """None: it does not look."""


class ScoredPolicy:
    """The chunk with the lowest score goes first, one without a score last: nothing is known against it."""

    def rank(self, chunk: int, entry: ChunkEntry) -> float:
        """Its score."""
        return math.inf if entry.score is None else entry.score


class Qk(ScoredPolicy):
    """Chunks whose mean key points the way of the last queries stay; see `scorer`.

    Parameters
    ----------
    scorer : Scorer
        Holds the keys of the sealed chunks.
    """

    name = "qk"
    needs = ("queries",)

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def scores(self, seen: AttentionSeen) -> list[float]:
        """Of each chunk of the chain; `CapabilityError` when no queries were seen."""
        return self.scorer.scores(needed(self.name, "queries", seen.queries), seen.chain)


class SignBit(Qk):
    """Chunks that hold a key whose signs agree with the last queries stay, one bit kept per number of K."""

    name = "sign_bit"


class Oracle(ScoredPolicy):
    """Chunks that the last token really attends to stay: what no guess at it could beat."""

    name = "oracle"
    needs = ("mass",)

    def scores(self, seen: AttentionSeen) -> list[float]:
        """The true attention mass; `CapabilityError` when it was not measured."""
        return list(needed(self.name, "mass", seen.mass))


MAKERS: dict[str, Callable[[Geometry, int], Policy]] = {
    Lru.name: lambda geometry, seed: Lru(),
    Qk.name: lambda geometry, seed: Qk(Scorer(geometry, MEAN)),
    Oracle.name: lambda geometry, seed: Oracle(),
    Random.name: lambda geometry, seed: Random(seed),
    SignBit.name: lambda geometry, seed: SignBit(Scorer(geometry, SIGNS)),
}


def build(name: str, geometry: Geometry, seed: int = 0) -> Policy:
    """The policy that has this name, with nothing scored yet.

    Parameters
    ----------
    name : {"lru", "qk", "oracle", "random", "sign_bit"}
    geometry : Geometry
        Of the chunks that `qk` and `sign_bit` keep keys of.
    seed : int
        Of `random`.

    Raises
    ------
    UnknownName
        When no policy has the name.
    """
    if name not in MAKERS:
        raise UnknownName("residency policy", name, MAKERS)
    return MAKERS[name](geometry, seed)


def worst_first(policy: Policy, entries: Iterable[tuple[int, ChunkEntry]]) -> list[int]:
    """Chunks in the order in which they would have to go; of equals the first one goes first."""
    ranked = [(policy.rank(chunk, entry), chunk) for chunk, entry in entries]
    return [chunk for _, chunk in sorted(ranked)]


def staying(config: PagerConfig, entries: Sequence[ChunkEntry]) -> set[int]:
    """Which chunks of a cache that ends after these lie in its pool, by what the ledger says.

    Those that it calls resident, the sinks and the tail. Where these are more than the pool has blocks, the
    protected ones stay, then those of the highest score, then those used last; one without a score counts as
    having the highest, as it does for an eviction.
    """
    tail = len(entries) - 1 - config.tail_chunks

    def protected(number: int) -> bool:
        return number < config.sink_chunks or number >= tail

    def claim(number: int) -> tuple[bool, float, int, int]:
        entry = entries[number]
        return protected(number), math.inf if entry.score is None else entry.score, entry.last_use, number

    wanted = [number for number, entry in enumerate(entries) if entry.resident or protected(number)]
    return set(sorted(wanted, key=claim, reverse=True)[: config.blocks])


def needed(policy: str, name: str, value):
    """What a policy cannot do without."""
    if value is None:
        raise CapabilityError(
            f"the residency policy {policy!r} needs the {name} of a decode step", code="capability.policy-input"
        )
    return value

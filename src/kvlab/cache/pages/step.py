"""What one step of a server looks at, laid out once for all layers.

Where a sequence is cut depends on its own length alone, so an answer does not depend on who else is in the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.klt.reading import Looked

SPAN = 1024  # tokens of one sequence that are attended to at once
FEW = 32  # queries of a sequence, up to which weighing V's components costs less than making V of them
SCRATCH = 4 * SPAN  # tokens that are decoded at once, of as many sequences as that makes
QUERIES = 128  # queries of one sequence that attend at once: no more keys are looked at than the last one sees


class Mask(NamedTuple):
    """Which keys queries see, as torch's kernel for a CPU takes it.

    Parameters
    ----------
    bias : Tensor
        0 where a query sees a key and -inf elsewhere, float32 [..., queries, keys].
    blind : Tensor
        Queries that see none, bool [..., queries].
    """

    bias: Tensor
    blind: Tensor

    @classmethod
    def of(cls, seen: Tensor) -> Mask:
        """Of bool [..., queries, keys]."""
        bias = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
        return cls(bias.masked_fill_(~seen, -torch.inf), ~seen.any(-1))


@dataclass(frozen=True)
class ExactBlock:
    """Neighbouring queries of a chunk, and those of its keys that one of them sees: its first and its last ones.

    Parameters
    ----------
    queries : slice
        Of the step's.
    sinks, recents : slice
        Of the chunk's keys.
    positions : Tensor
        Of these keys, int64.
    own : Tensor
        Of the queries, int64.
    until : Tensor
        The position at which the coded tokens of each query end, int64.
    """

    queries: slice
    sinks: slice
    recents: slice
    positions: Tensor
    own: Tensor
    until: Tensor

    @property
    def mask(self) -> Mask:
        """Which of these keys each query sees; made once for all layers where there are not many."""
        return self._mask if len(self.positions) <= SPAN else self._made()

    @cached_property
    def _mask(self) -> Mask:
        return self._made()

    def _made(self) -> Mask:
        coded = (self.positions >= self.sinks.stop) & (self.positions < self.until[:, None])
        return Mask.of((self.positions <= self.own[:, None]) & ~coded)


class ExactChunk(NamedTuple):
    """Several queries of one sequence. Their keys are its sinks, and after them its recent tokens.

    Parameters
    ----------
    row : int
        Where its tokens of before are kept.
    queries : slice
        Of the step's; its own tokens are theirs.
    sinks, recents : Tensor
        Places of the keys of before, int64.
    own_sinks, own_recents : int
        How many of its own first tokens are sinks, and which of them is the first that is recent.
    blocks : tuple of ExactBlock
    """

    row: int
    queries: slice
    sinks: Tensor
    own_sinks: int
    recents: Tensor
    own_recents: int
    blocks: tuple[ExactBlock, ...]


@dataclass(frozen=True)
class ExactStep:
    """Where a step's exact tokens lie, the same for all layers.

    Parameters
    ----------
    sources, stored_rows, places : Tensor
        Which of the step's tokens are stored, in which row, and at which of its places, int64 [stored].
    single, single_rows : Tensor
        Queries that are the only one of their sequence, and their rows, int64 [singles].
    single_seen : Tensor
        Which places each of them sees, bool [singles, places].
    chunks : tuple of ExactChunk
        Of each sequence that has several queries.
    """

    sources: Tensor
    stored_rows: Tensor
    places: Tensor
    single: Tensor
    single_rows: Tensor
    single_seen: Tensor
    chunks: tuple[ExactChunk, ...]

    @cached_property
    def kept(self) -> tuple[NDArray, NDArray, NDArray]:
        """`sources`, `stored_rows` and `places`, as loops take them."""
        return self.sources.numpy(), self.stored_rows.numpy(), self.places.numpy()

    @cached_property
    def singles(self) -> tuple[NDArray, NDArray, NDArray]:
        """`single`, `single_rows` and `single_seen`, as loops take them."""
        return self.single.numpy(), self.single_rows.numpy(), self.single_seen.numpy()

    @cached_property
    def single_mask(self) -> Mask:
        """`single_seen` for torch's attention [singles, 1, 1, places]."""
        return Mask.of(self.single_seen[:, None, None])

    def to(self, device: torch.device) -> ExactStep:
        """With what indexes tensors of layers on their device."""
        moved = ("sources", "stored_rows", "places", "single", "single_rows", "single_seen")
        return replace(self, **{name: getattr(self, name).to(device) for name in moved})


@dataclass(frozen=True)
class ServerStep:
    """What one step of a server attends to, the same for all layers.

    Parameters
    ----------
    starts : tuple of int
        Where each sequence's queries begin among the step's tokens, and where the last one's end.
    lengths : tuple of int
        Tokens of each sequence, those of this step included.
    slots : Tensor
        Where each sequence's tokens lie in the pages, one after the other, int64 [sum of lengths].
    first : tuple of int
        The position at which each sequence's coded tokens begin; those below it are read exact.
    until : Tensor
        The position at which the coded tokens of each query end, int64 [tokens]. It grows with a sequence's queries.
        A query reads `first` to `until` - 1 coded, and nothing where `until` is not above `first`.
    exact : ExactStep or None
        The other tokens that queries look at; None where all are read coded.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: Tensor
    first: tuple[int, ...]
    until: Tensor
    exact: ExactStep | None = None

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], blocks: Tensor, block_size: int) -> ServerStep:
        """That of a block table int [sequences, most blocks], with all tokens read coded."""
        row, at = numbered(lengths)
        slots = blocks.numpy()[row, at // block_size].astype(np.int64) * block_size + at % block_size
        until = positions(starts, lengths) + 1
        return cls(tuple(starts), tuple(lengths), torch.from_numpy(slots), (0,) * len(lengths), until)

    @property
    def tokens(self) -> int:
        """Queries of the step."""
        return self.starts[-1]

    @cached_property
    def positions(self) -> Tensor:
        """Of the step's own tokens in their sequences, int64 [tokens]."""
        return positions(self.starts, self.lengths)

    def last(self, row: int) -> int:
        """The position at which the coded tokens end that some query of a sequence reads."""
        return max(self.first[row], int(self.until[self.starts[row + 1] - 1]))

    def coded(self) -> int:
        """Tokens that are read coded, over all sequences."""
        return sum(self.last(row) - first for row, first in enumerate(self.first))

    @cached_property
    def few(self) -> tuple[Tensor, Looked] | None:
        """Queries int64 [n] of sequences that have few of them, and what they look at; None where there are none."""
        starts, lengths, slots = np.array(self.starts), np.array(self.lengths, np.int64), self.slots.numpy()
        counts = np.diff(starts)
        rows = np.flatnonzero((counts > 0) & (counts <= FEW))
        if not len(rows):
            return None
        first, counts = np.array(self.first)[rows], counts[rows]
        tokens = np.maximum(self.until.numpy()[starts[rows + 1] - 1], first) - first
        (row, at), (of, number) = numbered(tokens), numbered(counts)
        slots = slots[(np.cumsum(lengths)[rows] - lengths[rows] + first)[row] + at]
        queries = starts[rows][of] + number
        seen = Looked.at(slots, tokens, first, [0, *np.cumsum(counts)], self.until.numpy()[queries])
        return torch.from_numpy(queries), seen

    @cached_property
    def all_few(self) -> bool:
        """Whether every sequence has few queries."""
        return self.few is not None and len(self.few[0]) == self.tokens

    @cached_property
    def single(self) -> bool:
        """Whether every sequence has one."""
        return self.starts == tuple(range(len(self.lengths) + 1))

    @cached_property
    def _masks(self) -> dict[tuple[int, int], Mask]:
        return {}

    def mask(self, queries: slice, first: int, keys: int) -> Mask | None:
        """Which of `keys` coded tokens of positions `first`, `first` + 1, ... queries see; None where all see all.

        Made once for all layers; while a step runs, that takes up to 4 kB for each of its queries.
        """
        if int(self.until[queries.start]) >= first + keys:
            return None
        if (queries.start, first) not in self._masks:
            self._masks[queries.start, first] = Mask.of(first + torch.arange(keys) < self.until[queries, None])
        return self._masks[queries.start, first]

    def own_slots(self) -> Tensor:
        """Where the step's own tokens lie, int64 [tokens]."""
        spans = zip(self.starts, self.starts[1:], accumulate(self.lengths), strict=False)
        return torch.cat([self.slots[end - (stop - start) : end] for start, stop, end in spans])


def positions(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Of the queries of sequences, their last tokens, int64 [queries]."""
    counts = np.diff(starts)
    row, at = numbered(counts)
    return torch.from_numpy((np.array(lengths, np.int64) - counts)[row] + at)


def numbered(counts: Sequence[int] | NDArray) -> tuple[NDArray, NDArray]:
    """Of so many things of each row, one row's after the other's: the row, and the number in it, int64 [sum]."""
    counts = np.asarray(counts, np.int64)
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


@dataclass(frozen=True)
class Span:
    """Tokens `first` to `last` of sequence `row`, whose slots begin at `offset`."""

    row: int
    first: int
    last: int
    offset: int


def batches(step: ServerStep, few: bool) -> Iterator[list[Span]]:
    """Spans of all sequences, those with few queries too or not, as many at once as `SCRATCH` tokens are.

    Those of a sequence come in their order.
    """
    batch, held, offset = [], 0, 0
    for row, length in enumerate(step.lengths):
        own = few or step.starts[row + 1] - step.starts[row] > FEW
        for first in range(step.first[row], step.last(row), SPAN) if own else ():
            last = min(first + SPAN, step.last(row))
            if held + last - first > SCRATCH:
                yield batch
                batch, held = [], 0
            batch.append(Span(row, first, last, offset))
            held += last - first
        offset += length
    if batch:
        yield batch


def blocks(start: int, stop: int) -> list[slice]:
    """Queries `start` to `stop` of one sequence, as many at once as attend together."""
    return [slice(first, min(first + QUERIES, stop)) for first in range(start, stop, QUERIES)]

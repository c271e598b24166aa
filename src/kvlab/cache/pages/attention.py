"""Attention over coded pages: tokens are decoded a bounded number at a time, and none of them is kept.

Blocks of keys are attended to one after the other, and the results joined by their largest score and the sum of their
weights (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, FlashAttention, arXiv 2205.14135). Where a
sequence is cut depends on its own length alone, so an answer does not depend on who else is served in the step.

Each query reads a range of positions coded. What it reads exact (`pages.exact`) is attended to beside that, and
`joined` makes one answer of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.codecs.klt.reading import Looked

SPAN = 1024  # tokens of one sequence that are attended to at once
FEW = 32  # queries of a sequence, up to which weighing V's components costs less than making V of them
SCRATCH = 4 * SPAN  # tokens that are decoded at once, of as many sequences as that makes
QUERIES = 512  # queries of one sequence that attend at once

Read = Callable[[Tensor, Tensor, bool], "Keys"]
"""Slots and positions, int64 [n], and whether few queries look at them, to what attention needs of these tokens."""

Quick = Callable[[Looked, Tensor], "Attended"]
"""Tokens and the queries that look at them, few of each sequence, scaled float32 [n, heads, head_dim], to attention."""


class Attended(NamedTuple):
    """Attention of n queries over a part of their keys.

    Parameters
    ----------
    mean : Tensor
        Values weighed by the softmax over that part, float32 [n, heads, head_dim]; finite where the part is empty.
    log_sum : Tensor
        Logarithm of the sum of the exponentials of its scores, float32 [n, heads]; -inf where it is empty.
    """

    mean: Tensor
    log_sum: Tensor


class Keys(NamedTuple):
    """What attention needs of n tokens.

    Parameters
    ----------
    k : Tensor
        As attention sees them, float32 [kv_heads, n, head_dim].
    v : Tensor
        What is weighed and summed: values, or what values are made of, float32 [groups, n, width]; neighbouring KV
        heads share a group.
    finish : callable or None
        Makes values [kv_heads, ..., head_dim] of means of `v` [kv_heads, ..., width]; None where `v` are values.
    """

    k: Tensor
    v: Tensor
    finish: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class ExactStep:
    """Where a step's exact tokens lie, the same for all layers.

    Parameters
    ----------
    rows : Tensor
        Of each sequence's request among all that have places, int64 [sequences].
    sources, stored_rows, places : Tensor
        Which of the step's tokens are stored, in which row, and at which of its places, int64 [stored].
    single, single_rows : Tensor
        Queries that are the only one of their sequence, and their rows, int64 [singles].
    single_seen : Tensor
        Which places each of them sees, bool [singles, places].
    place : callable
        Positions of recent tokens, int64, to their places.
    """

    rows: Tensor
    sources: Tensor
    stored_rows: Tensor
    places: Tensor
    single: Tensor
    single_rows: Tensor
    single_seen: Tensor
    place: Callable[[Tensor], Tensor]


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
        each = [torch.arange(length) for length in lengths]
        slots = [blocks[row, at // block_size].long() * block_size + at % block_size for row, at in enumerate(each)]
        return cls(
            tuple(starts),
            tuple(lengths),
            torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64),
            (0,) * len(lengths),
            positions(starts, lengths) + 1,
        )

    @property
    def tokens(self) -> int:
        """Queries of the step."""
        return self.starts[-1]

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
        ends = list(accumulate(self.lengths))
        rows = [row for row in range(len(ends)) if self.starts[row + 1] - self.starts[row] <= FEW]
        rows = [row for row in rows if self.last(row) > self.first[row]]
        if not rows:
            return None
        begins = [ends[row] - self.lengths[row] for row in rows]
        spans = [(begin + self.first[row], begin + self.last(row)) for begin, row in zip(begins, rows, strict=True)]
        queries = torch.cat([torch.arange(self.starts[row], self.starts[row + 1]) for row in rows])
        starts = [0, *accumulate(self.starts[row + 1] - self.starts[row] for row in rows)]
        slots = torch.cat([self.slots[first:last] for first, last in spans])
        counts, firsts = [last - first for first, last in spans], [self.first[row] for row in rows]
        return queries, Looked.at(slots, counts, firsts, starts, self.until[queries])

    def own_slots(self) -> Tensor:
        """Where the step's own tokens lie, int64 [tokens]."""
        spans = zip(self.starts, self.starts[1:], accumulate(self.lengths), strict=False)
        return torch.cat([self.slots[end - (stop - start) : end] for start, stop, end in spans])


def positions(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Of the queries of sequences, their last tokens, int64 [queries]."""
    spans = zip(starts, starts[1:], lengths, strict=False)
    return torch.cat([torch.arange(length - (stop - start), length) for start, stop, length in spans])


@dataclass(frozen=True)
class Span:
    """Tokens `first` to `last` of sequence `row`, whose slots begin at `offset`."""

    row: int
    first: int
    last: int
    offset: int


def batches(step: ServerStep, few: bool) -> Iterator[list[Span]]:
    """Spans of all sequences with few queries, or of all others, as many at once as `SCRATCH` tokens are.

    Those of a sequence come in their order.
    """
    batch, held, offset = [], 0, 0
    for row, length in enumerate(step.lengths):
        own = (step.starts[row + 1] - step.starts[row] <= FEW) == few
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


class Running:
    """Attention of one sequence's queries over the keys that came so far.

    Parameters
    ----------
    q : Tensor
        [queries, heads, head_dim], in any float dtype.
    kv_heads : int
        Heads of K; neighbouring query heads share one.
    scale : float
        Of the scores.
    width : int
        Of what is summed (`Keys.v`).
    """

    def __init__(self, q: Tensor, kv_heads: int, scale: float, width: int):
        queries, _, head_dim = q.shape
        self.q = (q.float() * scale).view(queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3).contiguous()
        shape = self.q.shape[:-1]
        self.top, self.weight = q.new_full(shape, -torch.inf, dtype=torch.float32), self.q.new_zeros(shape)
        self.sum = self.q.new_zeros(*shape, width)

    def attend(self, k: Tensor, v: Tensor, first: int, until: Tensor) -> None:
        """Take in keys and values (`Keys`) of positions `first`, `first` + 1, ...

        Each query sees those below `until`, int64 [queries], which does not fall from query to query.
        """
        queries = self.q.shape[2]
        for start in range(0, queries, QUERIES):
            stop = min(start + QUERIES, queries)
            seen = int(until[stop - 1]) - first  # keys that the last of these queries may see
            if seen > 0:
                self._attend(slice(start, stop), k[:, :seen], v[:, :seen], first, until[start:stop])

    def _attend(self, rows: slice, k: Tensor, v: Tensor, first: int, until: Tensor) -> None:
        q = self.q[:, :, rows]
        scores = torch.bmm(q.flatten(1, 2), k.mT).view(*q.shape[:3], -1)
        if first + k.shape[1] > int(until[0]):
            late = first + torch.arange(k.shape[1]) >= until[:, None]
            scores.masked_fill_(late, -torch.inf)
        top = torch.maximum(self.top[:, :, rows], scores.amax(-1))
        least = top.masked_fill(top == -torch.inf, 0.0)  # a query may have seen no key yet
        kept = torch.exp(self.top[:, :, rows] - least)
        weights = scores.sub_(least[..., None]).exp_()
        self.weight[:, :, rows] = self.weight[:, :, rows] * kept + weights.sum(-1)
        more = torch.bmm(weights.view(len(v), -1, k.shape[1]), v).view(*q.shape[:3], -1)
        self.sum[:, :, rows] = self.sum[:, :, rows] * kept[..., None] + more
        self.top[:, :, rows] = top

    def result(self, finish: Callable[[Tensor], Tensor] | None) -> Attended:
        """Of all queries."""
        mean = self.sum / self.weight.masked_fill(self.weight == 0, 1.0)[..., None]
        mean = (finish(mean) if finish else mean).permute(2, 0, 1, 3).flatten(1, 2)
        return Attended(mean, (self.top + self.weight.log()).permute(2, 0, 1).flatten(1))


def attend(
    query: Tensor, read: Read, step: ServerStep, kv_heads: int, scale: float, quick: Quick | None = None
) -> Attended:
    """Attention of a step's queries over the coded tokens that each of them reads.

    Parameters
    ----------
    query : Tensor
        [tokens, heads, head_dim].
    read : Read
        Decodes tokens.
    step : ServerStep
        Which ones.
    kv_heads : int
        Heads of K and V.
    scale : float
        Of the scores.
    quick : callable, optional
        Attends where a sequence has few queries; torch does where it is not given.
    """
    found = nothing(query)
    running: dict[int, Running] = {}
    if quick and step.few:
        queries, looked = step.few
        found.mean[queries], found.log_sum[queries] = quick(looked, query[queries].float() * scale)
    for few in (False,) if quick else (True, False):
        for batch in batches(step, few):
            slots = torch.cat([step.slots[span.offset + span.first : span.offset + span.last] for span in batch])
            places = torch.cat([torch.arange(span.first, span.last) for span in batch])
            k, v, finish = read(slots, places, few)
            at = 0
            for span in batch:
                own, at = slice(at, at + span.last - span.first), at + span.last - span.first
                queries = slice(step.starts[span.row], step.starts[span.row + 1])
                if span.first == step.first[span.row]:
                    running[span.row] = Running(query[queries], kv_heads, scale, v.shape[-1])
                running[span.row].attend(k[:, own], v[:, own], span.first, step.until[queries])
                if span.last == step.last(span.row):
                    mean, log_sum = running.pop(span.row).result(finish)
                    found.mean[queries], found.log_sum[queries] = mean, log_sum
    return found


def nothing(query: Tensor) -> Attended:
    """Attention of queries [n, heads, head_dim] over no keys."""
    return Attended(
        torch.zeros(query.shape, dtype=torch.float32),
        torch.full(query.shape[:2], -torch.inf, dtype=torch.float32),
    )


def joined(one: Attended, other: Attended) -> Tensor:
    """Attention over two parts of which each query sees at least one key, float32 [n, heads, head_dim].

    The softmax over both is that over each, weighed by its share of the exponentials (FlashAttention, arXiv
    2205.14135).
    """
    share = torch.sigmoid(one.log_sum - other.log_sum)[..., None]
    return share * one.mean + (1 - share) * other.mean

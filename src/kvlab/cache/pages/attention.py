"""Attention over coded pages: tokens are decoded a bounded number at a time, and none of them is kept.

Blocks of keys are attended to one after the other, and the results joined by their largest score and the sum of their
weights (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, FlashAttention, arXiv 2205.14135). Where a
sequence is cut depends on its own length alone, so an answer does not depend on who else is served in the step.

Each query reads a range of positions coded. What it reads exact (`pages.exact`) is attended to beside that, and
`joined` makes one answer of both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
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

Read = Callable[[Tensor, Tensor], "Keys"]
"""Slots and positions, int64 [n], to what attention needs of these tokens."""

Quick = Callable[[Looked, Tensor], "Attended"]
"""Tokens and the queries that look at them, few of each sequence [n, heads, head_dim], to attention."""


@cache
def compiled() -> bool:
    """Whether there is what compiles loops over tokens for a CPU."""
    return importlib.util.find_spec("numba") is not None


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
    k, v : Tensor
        As attention sees them [kv_heads, n, head_dim].
    """

    k: Tensor
    v: Tensor


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

    @cached_property
    def kept(self) -> tuple[NDArray, NDArray, NDArray]:
        """`sources`, `stored_rows` and `places`, as loops take them."""
        return self.sources.numpy(), self.stored_rows.numpy(), self.places.numpy()

    @cached_property
    def singles(self) -> tuple[NDArray, NDArray, NDArray]:
        """`single`, `single_rows` and `single_seen`, as loops take them."""
        return self.single.numpy(), self.single_rows.numpy(), self.single_seen.numpy()

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


class Running:
    """Attention of one sequence's queries over the keys that came so far.

    Parameters
    ----------
    query : Tensor
        [queries, heads, head_dim]; keys and values are rounded to its dtype.
    kv_heads : int
        Heads of K; neighbouring query heads share one.
    scale : float
        Of the scores.
    """

    def __init__(self, query: Tensor, kv_heads: int, scale: float):
        self.q, self.scale, self.found = query.unflatten(1, (kv_heads, -1)), scale, nothing(query)

    def attend(self, keys: Keys, first: int, until: Tensor) -> None:
        """Take in keys of positions `first`, `first` + 1, ...

        Each query sees those below `until`, int64 [queries], which does not fall from query to query.
        """
        k, v = (part.to(self.q.dtype)[None] for part in keys)
        for start in range(0, len(self.q), QUERIES):
            own = slice(start, min(start + QUERIES, len(self.q)))
            seen = min(int(until[own.stop - 1]) - first, k.shape[2])  # keys that the last of these queries may see
            if seen > 0:
                q = self.q[own].permute(1, 2, 0, 3)
                mask = first + torch.arange(seen) < until[own, None]
                more = softmax_over(q.flatten(1, 2)[None], k[:, :, :seen], v[:, :, :seen], mask, self.scale)
                self._add(own, *(part.unflatten(2, (-1, q.shape[2]))[0].flatten(0, 1).transpose(0, 1) for part in more))

    def _add(self, own: slice, mean: Tensor, log_sum: Tensor) -> None:
        """Attention of some queries over further keys."""
        total = torch.logaddexp(self.found.log_sum[own], log_sum)
        share = torch.exp(log_sum - total).nan_to_num_()[..., None]  # of a query that saw nothing yet
        self.found.mean[own] += share * (mean - self.found.mean[own])
        self.found.log_sum[own] = total


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
    if quick and step.all_few:
        return quick(step.few[1], query)
    found = nothing(query)
    running: dict[int, Running] = {}
    if quick and step.few:
        queries, looked = step.few
        found.mean[queries], found.log_sum[queries] = quick(looked, query[queries])
    for batch in batches(step, not quick):
        slots = torch.cat([step.slots[span.offset + span.first : span.offset + span.last] for span in batch])
        places = torch.cat([torch.arange(span.first, span.last) for span in batch])
        k, v = read(slots, places)
        at = 0
        for span in batch:
            own, at = slice(at, at + span.last - span.first), at + span.last - span.first
            queries = slice(step.starts[span.row], step.starts[span.row + 1])
            if span.first == step.first[span.row]:
                running[span.row] = Running(query[queries], kv_heads, scale)
            running[span.row].attend(Keys(k[:, own], v[:, own]), span.first, step.until[queries])
            if span.last == step.last(span.row):
                found.mean[queries], found.log_sum[queries] = running.pop(span.row).found
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


def softmax_over(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Attended:
    """Attention in float32, which also gives the sum of a softmax: by torch's kernel for a CPU, else by products.

    Parameters
    ----------
    q : Tensor
        [n, kv_heads, queries, head_dim].
    k, v : Tensor
        [n, kv_heads, keys, head_dim], of the same dtype.
    seen : Tensor
        Which keys queries see, bool [rows, keys], or [n, 1, rows, keys]; over and over for `queries` of them, as of
        those heads of the same queries that share one of K.

    Returns
    -------
    Attended
        Of [n, kv_heads, queries].
    """
    heads = [*[1] * (seen.dim() - 2), q.shape[2] // seen.shape[-2]]
    if q.device.type != "cpu":
        scores = (scale * q.float() @ k.float().mT).masked_fill_(~seen.repeat(*heads, 1), -torch.inf)
        log_sum = scores.logsumexp(-1)
        return Attended((scores - log_sum[..., None]).exp_().nan_to_num_() @ v.float(), log_sum)
    bias = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, -torch.inf)
    bias = bias.repeat(*heads, 1).expand(len(q), 1, q.shape[2], k.shape[2])
    mean, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    blind = ~seen.any(-1).repeat(*heads)
    return Attended(mean.float(), log_sum.masked_fill(blind.expand(log_sum.shape), -torch.inf))

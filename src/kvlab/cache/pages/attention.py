"""Attention over coded pages: tokens are decoded a bounded number at a time, and none of them is kept.

Blocks of keys are attended to one after the other, and the results joined by their largest score and the sum of their
weights (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, FlashAttention, arXiv 2205.14135). Where a
sequence is cut depends on its own length alone, so an answer does not depend on who else is served in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

SPAN = 1024  # tokens of one sequence that are attended to at once
FEW = 32  # queries of a sequence, up to which weighing V's components costs less than making V of them
SCRATCH = 4 * SPAN  # tokens that are decoded at once, of as many sequences as that makes
QUERIES = 512  # queries of one sequence that attend at once

Read = Callable[[Tensor, Tensor, bool], "Keys"]
"""Slots and positions, int64 [n], and whether few queries look at them, to what attention needs of these tokens."""


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
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: Tensor

    @classmethod
    def of(cls, starts: list[int], lengths: list[int], blocks: Tensor, block_size: int) -> ServerStep:
        """That of a block table int [sequences, most blocks]."""
        each = [torch.arange(length) for length in lengths]
        slots = [blocks[row, at // block_size].long() * block_size + at % block_size for row, at in enumerate(each)]
        return cls(tuple(starts), tuple(lengths), torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64))

    @property
    def tokens(self) -> int:
        """Queries of the step."""
        return self.starts[-1]

    def positions(self) -> Tensor:
        """Of the step's own tokens in their sequences, int64 [tokens]."""
        spans = zip(self.starts, self.starts[1:], self.lengths, strict=False)
        return torch.cat([torch.arange(length - (stop - start), length) for start, stop, length in spans])

    def own_slots(self) -> Tensor:
        """Where the step's own tokens lie, int64 [tokens]."""
        spans = zip(self.starts, self.starts[1:], accumulate(self.lengths), strict=False)
        return torch.cat([self.slots[end - (stop - start) : end] for start, stop, end in spans])


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
        for first in range(0, length, SPAN) if own else ():
            last = min(first + SPAN, length)
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
    first : int
        Position of the first query.
    width : int
        Of what is summed (`Keys.v`).
    """

    def __init__(self, q: Tensor, kv_heads: int, scale: float, first: int, width: int):
        queries, _, head_dim = q.shape
        self.first = first
        self.q = (q.float() * scale).view(queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3).contiguous()
        shape = self.q.shape[:-1]
        self.top, self.weight = q.new_full(shape, -torch.inf, dtype=torch.float32), self.q.new_zeros(shape)
        self.sum = self.q.new_zeros(*shape, width)

    def attend(self, k: Tensor, v: Tensor, first: int) -> None:
        """Take in keys and values (`Keys`) of positions `first`, `first` + 1, ..."""
        queries = self.q.shape[2]
        for start in range(0, queries, QUERIES):
            stop = min(start + QUERIES, queries)
            seen = self.first + stop - first  # keys that the last of these queries may see
            if seen > 0:
                self._attend(slice(start, stop), k[:, :seen], v[:, :seen], first)

    def _attend(self, rows: slice, k: Tensor, v: Tensor, first: int) -> None:
        q = self.q[:, :, rows]
        scores = torch.bmm(q.flatten(1, 2), k.mT).view(*q.shape[:3], -1)
        position = torch.arange(rows.start, rows.stop) + self.first
        if first + k.shape[1] - 1 > int(position[0]):
            late = first + torch.arange(k.shape[1]) > position[:, None]
            scores.masked_fill_(late, -torch.inf)
        top = torch.maximum(self.top[:, :, rows], scores.amax(-1))
        kept = torch.exp(self.top[:, :, rows] - top)
        weights = scores.sub_(top[..., None]).exp_()
        self.weight[:, :, rows] = self.weight[:, :, rows] * kept + weights.sum(-1)
        more = torch.bmm(weights.view(len(v), -1, k.shape[1]), v).view(*q.shape[:3], -1)
        self.sum[:, :, rows] = self.sum[:, :, rows] * kept[..., None] + more
        self.top[:, :, rows] = top

    def result(self, finish: Callable[[Tensor], Tensor] | None) -> Tensor:
        """[queries, heads, head_dim], float32."""
        mean = self.sum / self.weight[..., None]
        return (finish(mean) if finish else mean).permute(2, 0, 1, 3).flatten(1, 2)


def attend(query: Tensor, read: Read, step: ServerStep, kv_heads: int, scale: float, out: Tensor) -> None:
    """Causal attention of a step's queries over their sequences, into `out`.

    Parameters
    ----------
    query, out : Tensor
        [tokens, heads, head_dim].
    read : Read
        Decodes tokens.
    step : Step
        Which ones.
    kv_heads : int
        Heads of K and V.
    scale : float
        Of the scores.
    """
    running: dict[int, Running] = {}
    for few in (True, False):
        for batch in batches(step, few):
            slots = torch.cat([step.slots[span.offset + span.first : span.offset + span.last] for span in batch])
            positions = torch.cat([torch.arange(span.first, span.last) for span in batch])
            k, v, finish = read(slots, positions, few)
            at = 0
            for span in batch:
                own, at = slice(at, at + span.last - span.first), at + span.last - span.first
                start, stop, length = step.starts[span.row], step.starts[span.row + 1], step.lengths[span.row]
                if span.first == 0:
                    first = length - (stop - start)
                    running[span.row] = Running(query[start:stop], kv_heads, scale, first, v.shape[-1])
                running[span.row].attend(k[:, own], v[:, own], span.first)
                if span.last == length:
                    out[start:stop] = running.pop(span.row).result(finish).to(out.dtype)

"""One forward of a transformers cache whose rows are those of vLLM's pages: whose tokens are where, and read what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.pages.exact import Ring
from kvlab.cache.pages.step import ServerStep, numbered

if TYPE_CHECKING:
    from kvlab.codecs.klt.served_triton import CodedSpans


class Sequences(NamedTuple):
    """What a layer knows of each sequence of its batch.

    Parameters
    ----------
    pads, lengths : tuple of int
        Columns of padding on its left, and its tokens after these.
    low : tuple of int
        The position below which it is read coded whatever is recent: a crop gave up what was kept exact.
    """

    pads: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    low: tuple[int, ...] = ()

    @classmethod
    def empty(cls, batch: int) -> Sequences:
        """Of a batch of which nothing has come yet."""
        return cls(*[(0,) * batch] * 3)

    @property
    def columns(self) -> int:
        """Tokens of each row, padding included."""
        return self.pads[0] + self.lengths[0] if self.pads else 0

    def coded(self, ring: Ring) -> list[tuple[int, int]]:
        """Of each row the positions from and below which a later call reads it coded; before and after them, exact."""
        found = []
        for length, low in zip(self.lengths, self.low, strict=True):
            first = min(ring.sink, length)
            found.append((first, max(first, low, length + 1 - ring.recent)))
        return found

    def after(self, pads: Sequence[int], tokens: int) -> Sequences:
        """With a call of so many columns, of which each row's first ones are padding."""
        return Sequences(
            tuple(old + new for old, new in zip(self.pads, pads, strict=True)),
            tuple(old + tokens - new for old, new in zip(self.lengths, pads, strict=True)),
            self.low,
        )

    def cropped(self, columns: int, recent: int) -> Sequences:
        """The first columns."""
        lengths = tuple(max(0, columns - pads) for pads in self.pads)
        lows = tuple(
            min(new, max(low, old - recent)) if new < old else low
            for low, old, new in zip(self.low, self.lengths, lengths, strict=True)
        )
        return Sequences(tuple(min(pads, columns) for pads in self.pads), lengths, lows)

    def chosen(self, indices: Sequence[int]) -> Sequences:
        """Those of these rows."""
        return Sequences(*(tuple(part[i] for i in indices) for part in self)) if self.pads else self


@dataclass(eq=False)
class ServedCall:
    """One forward's tokens, the same for all layers.

    Parameters
    ----------
    before, after : Sequences
        What is held before and after it.
    tokens, capacity : int
        Its columns; and the tokens that a row has room for.
    ring : Ring
        Of exact tokens.
    device : torch.device
        Where the layers are.
    """

    before: Sequences
    after: Sequences
    tokens: int
    capacity: int
    ring: Ring
    device: torch.device
    _known: Tensor | None = field(default=None, init=False)

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.after.pads)

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of each row that are no padding."""
        return [min(self.tokens, length) for length in self.after.lengths]

    @cached_property
    def rows(self) -> list[int]:
        """Those that have any: the sequences of `step`."""
        return [row for row, count in enumerate(self.counts) if count]

    @cached_property
    def step(self) -> ServerStep:
        """Which of its queries read what."""
        counts = [self.counts[row] for row in self.rows]
        lengths = [self.after.lengths[row] for row in self.rows]
        rows, (row, at), before = np.array(self.rows, np.int64), numbered(lengths), self.before.coded(self.ring)
        slots = torch.from_numpy(rows[row] * self.capacity + at)
        first = np.array([min(self.ring.sink, length) for length in lengths])
        until = np.maximum([before[row][1] for row in self.rows], first).repeat(counts)
        starts = 0, *accumulate(counts)
        step = ServerStep(starts, tuple(lengths), slots, tuple(first.tolist()), torch.from_numpy(until))
        step = self.ring.beside(step, rows, first, until)
        return replace(step, exact=step.exact.to(self.device))

    @cached_property
    def own_slots(self) -> Tensor:
        """Where its tokens are stored, int64 [n]."""
        return self.step.own_slots().to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Of its tokens, int64 [n]."""
        return self.step.positions.to(self.device)

    @cached_property
    def span(self) -> CodedSpans:
        """What its queries read coded where each row has one, for a GPU's kernels: a row of the batch is a page."""
        from kvlab.codecs.klt.served_triton import CodedSpans

        blocks, until = torch.tensor(self.rows)[:, None], self.step.until.tolist()
        return CodedSpans.of(blocks, list(self.step.first), until, self.device)

    @cached_property
    def real(self) -> Tensor:
        """Which of its columns are no padding, bool [batch, tokens]."""
        real = torch.arange(self.tokens) >= self.tokens - torch.tensor(self.counts)[:, None]
        return real.to(self.device)

    @property
    def has_padding(self) -> bool:
        """Whether any is."""
        return sum(self.counts) < self.batch * self.tokens

    @property
    def several(self) -> bool:
        """Whether some row has more than one token."""
        return max(self.counts) > 1

    def flat(self, x: Tensor) -> Tensor:
        """Its tokens [n, heads, head_dim] of [batch, heads, tokens, head_dim]."""
        x = x.transpose(1, 2)
        return x[self.real] if self.has_padding else x.reshape(-1, *x.shape[2:])

    def unflat(self, x: Tensor) -> Tensor:
        """The way back, to [batch, tokens, heads, head_dim], zero where it is padding."""
        if not self.has_padding:
            return x.view(self.batch, self.tokens, *x.shape[1:])
        out = x.new_zeros(self.batch, self.tokens, *x.shape[1:])
        out[self.real] = x
        return out

    def is_causal(self, mask: Tensor | None) -> bool:
        """Whether a mask shows each token what stands before it in its row, padding left out, and itself."""
        if mask is None:
            return self.tokens == 1 and not any(self.after.pads)
        if mask is self._known:
            return True
        due = (self.batch, self.tokens, self.after.columns)
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-2:] != due[1:]:
            return False
        shown = mask if mask.dtype == torch.bool else mask == 0
        hidden = mask.dtype == torch.bool or bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all())
        column, last = torch.arange(due[2]), torch.arange(due[2] - due[1], due[2])[:, None]
        seen = ((column <= last) & (column >= torch.tensor(self.after.pads)[:, None, None])).to(mask.device)
        same = (shown == seen[:, None]) | ~self.real[:, None, :, None]
        if not hidden or not same.all():
            return False
        self._known = mask
        return True

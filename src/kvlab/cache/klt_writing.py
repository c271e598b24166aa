"""Rows of `klt` written by compiled loops, where a few tokens come at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvlab.cache import hot_writing
from kvlab.cache.pages.numba_rows import arrays_of
from kvlab.cache.pages.rows import KltRows
from kvlab.codec.base import all_finite
from kvlab.codec.klt.codec import Plan
from kvlab.codec.klt.grouping import centred
from kvlab.codec.klt.scales import LOUD, NEAR

SLACK = 1.02  # more than the chooser's own: what it would look at is looked at
NARROW = 1e-4  # of the range that the chooser does not look at, which rounds it otherwise


class QuickRows(KltRows):
    """The same rows, sooner."""

    def __init__(self, rows: KltRows):
        self.site, self.plan, self.bytes = rows.site, rows.plan, rows.bytes
        self.digits, self.usual = arrays_of(self.plan), usual_of(self.plan)
        self.counts = ((1 << self.plan.widths.flatten()) - 1).to(torch.uint8).numpy()

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """See `pages.rows.Rows`."""
        plan, x = self.plan, x.float()
        z = plan._components(centred(x, plan.mean)).contiguous()
        if not all_finite(z):
            return super().encode(x)  # which says so
        count, rows = x.shape[1], plan.rows + plan.groups * plan.escaping
        own, looked = np.zeros((count, rows), np.uint8), np.zeros(count, np.uint8)
        hot_writing.symbols(z.numpy(), self.digits, self.counts, plan.escaping, self.usual, own, looked)
        at = looked.nonzero()[0]
        if len(at):
            known = torch.from_numpy(own[at, : plan.rows].T)
            own[at] = plan.analyse(x[:, torch.from_numpy(at)], self.site, known)[0].T.numpy()
        out = torch.zeros(count, self.bytes, dtype=torch.uint8)
        hot_writing.packed(own, self.digits, out.numpy())
        return out


def usual_of(plan: Plan) -> hot_writing.Usual:
    """Where a plan's usual vectors are; without escapes nothing reads it."""
    if not plan.escaping:
        none, nothing = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
        return hot_writing.Usual(none, none, none, none, nothing, 0.0, 0.0)
    choose = plan.choose
    within = (choose.high - choose.low) * NARROW
    low, high = (part.contiguous().numpy() for part in (choose.low + within, choose.high - within))
    share, toward = (part[:, 0].contiguous().numpy() for part in (choose.share, choose.toward_sink))
    return hot_writing.Usual(
        low, high, share, toward, choose.sink_square[:, 0].contiguous().numpy(), SLACK * NEAR, LOUD / SLACK
    )

"""What is fitted, folded up window by window: the moments of Q, K and V of every layer.

Their size depends on the model alone, but for one number per window and KV head: the trace that intervals over
windows are made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.shared.grouping import heads_together, joined
from kvlab.codecs.shared.metric import rotated
from kvlab.codecs.shared.moments import Moments
from kvlab.core.errors import Fault, NonFinite
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Placement
from kvlab.engines.base import Part

STREAMS = ("k", "v")
PLACEMENTS: tuple[Placement, ...] = ("pre_rope", "post_rope")
HALVES = 2  # of the windows: what is scored must not have calibrated


@dataclass(frozen=True)
class Extent:
    """How much text there is to calibrate on.

    Parameters
    ----------
    windows : int
        All windows.
    tokens : int
        Of a window; its queries count all of them.
    context : int
        The first tokens of a window, whose K and V a codec sees; only these count for K and V. The very first is apart:
        attention rests on it, and its K and V are unlike all others.
    """

    windows: int
    tokens: int
    context: int

    def half(self, window: int) -> int:
        """0 for a window of the first half, else 1."""
        return int(window >= self.windows // 2)

    @property
    def rows(self) -> int:
        """Tokens of all windows that the moments of K and V are of."""
        return self.windows * (self.context - 1)


def grouped(q: Tensor, n_kv_heads: int) -> Tensor:
    """Queries [n_heads, tokens, head_dim] by KV head, float64 [n_kv_heads, n_heads / n_kv_heads * tokens, head_dim].

    Query head j belongs to KV head ``j // (n_heads / n_kv_heads)``.
    """
    return q.double().unflatten(0, (n_kv_heads, -1)).flatten(1, 2)


class QueryMoments:
    """Uncentred second moments of one layer's queries by KV head, before and after their rotary embedding.

    Kept apart for the two halves of the windows.

    Parameters
    ----------
    extent : Extent
    n_kv_heads, head_dim : int
    device : torch.device or str
        Where sums are kept, and queries are brought.

    Attributes
    ----------
    sums : dict of Placement to Tensor
        Outer products added up, float64 [2, n_kv_heads, head_dim, head_dim].
    count : Tensor
        Queries of each KV head so far, float64 [2].
    traces : Tensor
        Trace of the second moment of each window alone, float64 [windows, n_kv_heads]; the rotary embedding
        changes none of them. NaN for a window that has not come.
    """

    def __init__(self, extent: Extent, n_kv_heads: int, head_dim: int, device: torch.device | str = "cpu"):
        self.extent, self.n_kv_heads = extent, n_kv_heads
        exact = {"dtype": torch.float64, "device": device}
        self.sums = {at: torch.zeros(HALVES, n_kv_heads, head_dim, head_dim, **exact) for at in PLACEMENTS}
        self.count = torch.zeros(HALVES, **exact)
        self.traces = torch.full((extent.windows, n_kv_heads), torch.nan, **exact)

    def update(self, q: Tensor, window: int, angles: tuple[Tensor, Tensor]) -> QueryMoments:
        """Fold in a window's queries [n_heads, tokens, head_dim] before their rotary embedding; self.

        `angles` are its cos and sin at the positions of the window, as `codecs.shared.metric.rotated` takes them.
        """
        q, half = q.to(self.count.device).double(), self.extent.half(window)
        cos, sin = (part.to(q.device) for part in angles)
        for placement, turned in (("pre_rope", q), ("post_rope", rotated(q, cos, sin))):
            rows = grouped(turned, self.n_kv_heads)
            self.sums[placement][half] += rows.mT @ rows
        rows = grouped(q, self.n_kv_heads)
        self.count[half] += rows.shape[1]
        self.traces[window] = rows.square().sum(-1).mean(-1)
        return self

    def merge(self, other: QueryMoments) -> QueryMoments:
        """Fold in those of other windows of the same text; self. `Fault` when a window is in both."""
        theirs = ~other.traces[:, 0].isnan().to(self.traces.device)
        if (theirs & ~self.traces[:, 0].isnan()).any():
            raise Fault(
                "moments that share a window cannot be merged: it would count twice", code="fault.shared-window"
            )
        for placement, mine in self.sums.items():
            mine += other.sums[placement].to(mine)
        self.count += other.count.to(self.count)
        self.traces[theirs] = other.traces.to(self.traces)[theirs]
        return self

    def second_moment(self, placement: Placement, half: int | None = None) -> Tensor:
        """Sigma_q, float64 [n_kv_heads, head_dim, head_dim], of all windows or of half of them; symmetric.

        The mean over the queries of a KV head's group at all positions.
        """
        used = slice(None) if half is None else slice(half, half + 1)
        sigma = self.sums[placement][used].sum(0) / self.count[used].sum()
        return (sigma + sigma.mT) / 2


class ModelMoments:
    """The moments of all layers of a model: `update` with what passes an engine's tap, `merge` from elsewhere.

    Parameters
    ----------
    info : ModelInfo
    extent : Extent
        All the text that will come, in any order.
    angles : sequence of tuple of Tensor
        By layer, cos and sin of the rotary embedding at the positions of a window, [tokens, pairs] each.
    """

    def __init__(self, info: ModelInfo, extent: Extent, angles: Sequence[tuple[Tensor, Tensor]]):
        self.info, self.extent, self.angles = info, extent, angles
        self.queries: dict[int, QueryMoments] = {}
        self.rows: dict[tuple[int, Part], Moments] = {}
        self.firsts: dict[tuple[int, Part], Tensor] = {}
        self.groups = info.n_kv_heads // heads_together(info.n_kv_heads, info.head_dim)

    def update(self, window: int, layer: int, part: Part, x: Tensor) -> None:
        """Fold in one layer's Q, K or V of a window, [heads, tokens, head_dim], before the rotary embedding.

        Rows of K and V are those of groups of heads, joined; the first tokens of windows have a mean of their own. Sums
        are kept on the device of the first tensor of a layer.

        Raises
        ------
        NonFinite
            It holds NaN or infinity.
        """
        if not torch.isfinite(x).all():
            raise NonFinite(
                f"captured layer_{layer}_{part} holds NaN or infinity in calibration window {window}",
                code="non-finite.capture",
            )
        heads, extent = self.info.n_kv_heads, self.extent
        if part == "q":
            if layer not in self.queries:
                self.queries[layer] = QueryMoments(extent, heads, self.info.head_dim, x.device)
            self.queries[layer].update(x, window, self.angles[layer])
            return
        if (layer, part) not in self.rows:
            width = heads * self.info.head_dim // self.groups
            self.rows[layer, part] = Moments(extent.rows, self.groups, width, x.device)
            self.firsts[layer, part] = torch.zeros(heads, self.info.head_dim, dtype=torch.float64, device=x.device)
        self.rows[layer, part].update(joined(x[:, 1 : extent.context], self.groups), window * (extent.context - 1))
        self.firsts[layer, part] += x[:, 0].to(self.firsts[layer, part]) / extent.windows

    def merge(self, other: ModelMoments) -> ModelMoments:
        """Fold in those of other windows of the same text; self. `Fault` when they are of another, or share one."""
        if self.extent != other.extent:
            raise Fault(
                f"moments of {other.extent} cannot be merged into those of {self.extent}", code="fault.other-extent"
            )
        for mine, theirs in ((self.queries, other.queries), (self.rows, other.rows)):
            for place, moments in theirs.items():
                if place in mine:
                    mine[place].merge(moments)
                else:
                    mine[place] = moments
        for place, part in other.firsts.items():
            self.firsts[place] = self.firsts[place] + part.to(self.firsts[place]) if place in self.firsts else part
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, on the CPU; `stored_queries` and `stored_rows` read it."""
        found = {}
        for layer, moments in sorted(self.queries.items()):
            found |= {f"layer_{layer}_q_{at}": total for at, total in moments.sums.items()}
            found |= {f"layer_{layer}_q_count": moments.count, f"layer_{layer}_q_traces": moments.traces}
        for (layer, part), moments in sorted(self.rows.items()):
            found |= {f"layer_{layer}_{part}_{name}": getattr(moments, name) for name in ROW_FIELDS}
            found[f"layer_{layer}_{part}_{FIRST}"] = self.firsts[layer, part]
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


QUERY_FIELDS = (*PLACEMENTS, "count", "traces")
ROW_FIELDS, FIRST = ("count", "mean", "scatter"), "first"


def names(n_layers: int) -> set[str]:
    """The names of `ModelMoments.tensors`."""
    fields = {"q": QUERY_FIELDS} | dict.fromkeys(STREAMS, (*ROW_FIELDS, FIRST))
    return {f"layer_{n}_{part}_{field}" for n in range(n_layers) for part, own in fields.items() for field in own}


def stored_queries(read, layer: int, extent: Extent) -> QueryMoments:
    """A layer's, from a function that gives the tensor of a name."""
    fields = {field: read(f"layer_{layer}_q_{field}") for field in QUERY_FIELDS}
    heads, head_dim = fields["pre_rope"].shape[1:3]
    found = QueryMoments(extent, heads, head_dim)
    found.sums = {at: fields[at] for at in PLACEMENTS}
    found.count, found.traces = fields["count"], fields["traces"]
    return found


def stored_rows(read, layer: int, stream: str, extent: Extent) -> Moments:
    """The same of a layer's K or V."""
    fields = (read(f"layer_{layer}_{stream}_{field}") for field in ROW_FIELDS)
    return Moments.holding(extent.rows, *fields)


def stored_first(read, layer: int, stream: str) -> Tensor:
    """The mean of K or V of the windows' first tokens, float64 [heads, head_dim]."""
    return read(f"layer_{layer}_{stream}_{FIRST}")

"""KVQuant (Hooper et al. 2024, arXiv 2401.18079): tables of any shape, K before its rotary embedding, outliers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Stats, StreamCalibration, finite, stored
from kvlab.codecs.kvquant import KvQuantStream
from kvlab.codecs.shared import fp16, quantizer
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.front import OwnFront
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.stream import packing
from kvlab.core.errors import CapabilityError, StreamError

OUTLIERS = 0.01  # of the values, half of them at either end ("1 %" in the paper's names, as in nuq4-1%)
SKETCH = 4096
UNSEEN = 1  # first tokens of a window that the fit leaves out: the attention sink is no inlier
MOST = 1 << 16  # values of a token, whose places are 16 bits wide


@dataclass(frozen=True)
class Fit:
    """What one layer's K or V looks like.

    Parameters
    ----------
    low, high : Tensor
        Between them lie all but the `OUTLIERS` of a channel, float32 [heads, head_dim]. Only K is scaled by them.
    sketch : Tensor
        Quantiles, at (i + 1/2) / S, of the values that are no outliers, brought to [-1, 1] as the codec brings them:
        by channel and by token. Float32 [2, S], for the axes ``channel`` and ``token``.
    """

    low: Tensor
    high: Tensor
    sketch: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """KV heads and head_dim."""
        return tuple(self.low.shape)

    @classmethod
    def of(cls, rows: Tensor) -> Fit:
        """The fit of a sample, float32 [heads, windows, tokens, head_dim]."""
        x = rows[:, :, min(UNSEEN, rows.shape[2] - 1) :].float().flatten(1, 2)
        ordered, dropped = x.sort(dim=1).values, int(OUTLIERS / 2 * x.shape[1])
        low, high = ordered[:, dropped], ordered[:, x.shape[1] - 1 - dropped]
        by_channel = ((x - low[:, None]) / span(low, high)[:, None] * 2 - 1).clamp(-1, 1)
        tokens = x.transpose(0, 1).flatten(1)
        least, most = range_of(tokens)
        by_token = ((tokens - least) / span(least, most) * 2 - 1).clamp(-1, 1)
        kept = [_inliers(values) for values in (by_channel, by_token)]
        return cls(low.clone(), high.clone(), torch.stack([_quantiles(values) for values in kept]))


class KvQuantCodec(TokenBlockCodec):
    """Values brought to [-1, 1] without their outliers, as the nearest of a layer's own 2**bits table values.

    ``axis: channel``, for K: the range of a channel is calibrated. ``axis: token``, for V: the range of a token over
    all heads is its own, stored as two float16; its outliers are as many at either end as `OUTLIERS` says, or one.
    Outliers are stored apart: their number per token, and place and value, 16 bits each.
    The paper fits a table by k-means in which every value weighs what the loss says of it (Fisher information); here
    each weighs alike, since no gradients are taken.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: KvQuantStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self._tables: dict[int, Tensor] = {}

    def make_front(self) -> OwnFront:
        """See `TokenBlockCodec.make_front`."""
        return OwnFront(self.recipe.codec, self.calibration)

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes, ranges and outliers of one block."""
        x = rows.transpose(0, 1).flatten(1)
        low, high, *ranges = self._range(x, layer)
        outside = (x < low) | (x > high)
        if x.shape[1] > MOST:
            raise CapabilityError(f"kvquant numbers the values of a token with 16 bits; {x.shape[1]} are too many")
        z = ((x - low) / span(low, high) * 2 - 1).clamp(-1, 1)
        codes = quantizer.codes(z, self._table(layer).to(x.device))
        place = outside.nonzero()[:, 1]
        values = fp16.nearest(x[outside], "value stored apart", layer)
        count = outside.sum(1)
        arrays = (
            packing.pack(codes.flatten(), self.recipe.bits),
            *ranges,
            (count - (count == MOST).long()).to(torch.uint16),
            place.to(torch.uint16),
            values,
        )
        return arrays, Stats(n_outliers=len(values), n_coefficients=x.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """Table values, scaled, and the outliers in their places."""
        heads, tokens, head_dim = shape
        wide, bits = heads * head_dim, self.recipe.bits
        ranges = ((torch.float16, (tokens, 2)),) if self.recipe.axis == "token" else ()
        codes, *ranges, count, place, values = stored(
            arrays,
            (torch.uint8, (packing.packed_size(tokens * wide, bits),)),
            *ranges,
            (torch.uint16, (tokens,)),
            (torch.uint16, (None,)),
            (torch.float16, (None,)),
        )
        count, place = count.to(torch.int64), place.to(torch.int64)
        if int(count.sum()) != len(place) or len(place) != len(values) or bool((place >= wide).any()):
            raise StreamError("the outliers of a block are not as many, or not where, the block says")
        z = self._table(layer).to(codes.device)[packing.unpack(codes, bits, tokens * wide).long()]
        low, high = fp16.read(ranges[0]).split(1, dim=1) if ranges else self._calibrated(layer, codes.device)
        x = (z.reshape(tokens, wide) + 1) / 2 * (high - low) + low
        x[torch.arange(tokens, device=x.device).repeat_interleave(count), place] = finite(values.float(), "an outlier")
        return x.unflatten(1, (heads, head_dim)).transpose(0, 1)

    def _range(self, x: Tensor, layer: int) -> tuple[Tensor, ...]:
        """Lower and upper end of what is no outlier in x [tokens, values], and what is stored of it, if anything."""
        if self.recipe.axis == "channel":
            return self._calibrated(layer, x.device)
        low, high = range_of(x)
        ends = (fp16.below(low, "lower end", layer), fp16.above(high, "upper end", layer))
        ranges = torch.cat(ends, dim=1)
        return (*(ranges.float().split(1, dim=1)), ranges)

    def _calibrated(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        own = self.front.of(layer)
        return own.low.flatten()[None].to(device), own.high.flatten()[None].to(device)

    def _table(self, layer: int) -> Tensor:
        if layer not in self._tables:
            own = self.front.of(layer).sketch[int(self.recipe.axis == "token")]
            self._tables[layer] = table_of(tuple(own.tolist()), self.recipe.bits)
        return self._tables[layer]


@lru_cache(maxsize=512)
@apart
def table_of(sketch: tuple[float, ...], bits: int) -> Tensor:
    """The table that is best on quantiles: Lloyd's, in units of their own standard deviation."""
    values = torch.tensor(sketch, dtype=torch.float64)
    scale = float(values.std().clamp(min=1e-6))
    return (quantizer.fit(values / scale, bits).double() * scale).float()


def range_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest of each row but its outliers, [n, 1] each."""
    n = tokens.shape[1]
    dropped = min(max(1, round(OUTLIERS / 2 * n)), (n - 1) // 2)
    ordered = tokens.sort(dim=1).values
    return ordered[:, dropped, None], ordered[:, n - 1 - dropped, None]


def span(low: Tensor, high: Tensor) -> Tensor:
    """What a range is divided by; 1 where it is a point."""
    return torch.where(high > low, high - low, 1)


def _inliers(values: Tensor) -> Tensor:
    """Those inside of the ends; all of them where there are none."""
    inside = values[values.abs() < 1]
    return inside if len(inside) else values.flatten()


def _quantiles(values: Tensor) -> Tensor:
    ordered = values.flatten().sort().values
    return ordered[((torch.arange(SKETCH, dtype=torch.float32) + 0.5) / SKETCH * len(ordered)).long()].contiguous()

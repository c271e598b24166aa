"""Rounding to the stored precision, and ragged tensors stored without their padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codec.base import Site
from kvlab.errors import NonFinite


@dataclass(frozen=True)
class Rounding:
    """Rounds side information to the stored dtype, and never to infinity in silence."""

    dtype: torch.dtype
    site: Site
    whitened: bool

    def __call__(self, values: Tensor, what: str) -> Tensor:
        """`values` in the stored dtype; `NonFinite` says how to mend an overflow of `what`."""
        rounded = values.to(self.dtype)
        if not torch.isfinite(rounded).all():
            other = f", or add layer {self.site.layer} to whiten_skip_layers" if self.whitened else ""
            raise NonFinite(
                f"layer {self.site.layer} {self.site.stream}: {what} of {values.abs().max().item():.4g} "
                f"does not fit the stored precision; use skeleton: fp32{other}"
            )
        return rounded


def prefix_mask(lengths: Tensor, width: int) -> Tensor:
    """True at the first lengths[i] of `width` places: [n] -> bool [n, width]."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def expand(values: Tensor, mask: Tensor) -> Tensor:
    """Spread flat `values` [true places, ...] over the True places of `mask`, as float32; 0 elsewhere."""
    full = torch.zeros(*mask.shape, *values.shape[1:], dtype=torch.float32, device=values.device)
    full[mask] = values.float()
    return full


def bits_for(counts: Tensor) -> Tensor:
    """ceil(log2(count)) of integers from 1 on, exactly."""
    return torch.frexp((counts - 1).double()).exponent.long()

"""Side information of the ladder: numbers kept as float16, never as infinity in silence."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.base import finite
from kvlab.core.errors import NonFinite

ROUNDING, SMALLEST = 2.0**-11, 2.0**-24  # of float16: largest relative error of rounding, smallest positive number


def nearest(values: Tensor, what: str, layer: int) -> Tensor:
    """`values` as float16; `NonFinite` names `what` and the layer when one is too large."""
    return _finite(values.to(torch.float16), values, what, layer)


def below(values: Tensor, what: str, layer: int) -> Tensor:
    """A float16 that is no more than each value, the value itself where float16 has it."""
    rounded = values.to(torch.float16)
    lower = (values - _margin(values)).to(torch.float16)
    return _finite(torch.where(rounded.float() > values, lower, rounded), values, what, layer)


def above(values: Tensor, what: str, layer: int) -> Tensor:
    """A float16 that is no less than each value, the value itself where float16 has it."""
    rounded = values.to(torch.float16)
    upper = (values + _margin(values)).to(torch.float16)
    return _finite(torch.where(rounded.float() < values, upper, rounded), values, what, layer)


def read(array: Tensor) -> Tensor:
    """Stored float16 as float32; `StreamError` when it holds NaN or infinity, which no encoder writes."""
    return finite(array.float(), "the side information of a block")


def _margin(values: Tensor) -> Tensor:
    return (values.abs() * ROUNDING).clamp(min=SMALLEST)


def _finite(rounded: Tensor, values: Tensor, what: str, layer: int) -> Tensor:
    if not torch.isfinite(rounded).all():
        raise NonFinite(
            f"layer {layer}: a {what} of {values.abs().max().item():.4g} does not fit float16, in which this codec "
            f"stores it; leave the layer uncoded, or add it to whiten_skip_layers if the recipe whitens",
            code="non-finite.too-large",
        )
    return rounded

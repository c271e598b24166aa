"""Numbers as single bits, and back."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0  # of float16; its square is what is stored of anything larger
VALUE_BITS = 16


def low_bits(numbers: Tensor, width: int) -> Tensor:
    """The lowest `width` bits, lowest first, uint8 [..., width]."""
    return (numbers[..., None] >> torch.arange(width, device=numbers.device) & 1).to(torch.uint8)


def number_of(bits: Tensor) -> Tensor:
    """The numbers of bits [..., width], lowest first, int64."""
    return (bits.long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)


def root_of(values: Tensor) -> Tensor:
    """Numbers as they are stored: the signed square root in float16, as int16."""
    return torch.copysign(values.abs().sqrt().clamp(max=LARGEST), values).half().view(torch.int16)


def value_of_root(stored: Tensor) -> Tensor:
    """The numbers float32 of what `root_of` made."""
    root = stored.view(torch.float16).float()
    return root * root.abs()


def bits_of_value(values: Tensor) -> Tensor:
    """Numbers as the signed square root in float16, uint8 [..., 16]: up to 4.3e9, to one part in a thousand."""
    return low_bits(root_of(values).int(), VALUE_BITS)


def value_of(bits: Tensor) -> Tensor:
    """The numbers float32 [...] of what `bits_of_value` made [..., 16]; not finite where no encoder wrote them."""
    return value_of_root(number_of(bits).to(torch.int16))

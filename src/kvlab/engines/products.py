"""Products of a model's weights on a processor that has no instructions for bfloat16 (x86 without AVX-512).

There torch multiplies matrices of bfloat16 a number at a time, about eight times slower than in float32. These products
are computed in float32 and rounded once, which is how processors with the instructions define them: products of two
bfloat16 are exact in float32, and so are added up there. Only the order of the sums differs, as it does between any two
processors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvlab.core.machine import lacks_bfloat16

STRIP = 1024  # rows of a weight that are float32 at once: they stay near the processor
FEWEST = 4  # tokens; for fewer, reading the weight is what is paid for, and torch's own product reads half the bytes


class Linear(nn.Linear):
    """torch's layer, with `linear` as its product."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., in_features]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `torch.nn.functional.linear` computes, in float32 and rounded once where the weight is bfloat16.

    Parameters
    ----------
    x : Tensor [..., in_features]
    weight : Tensor [out_features, in_features]
    bias : Tensor [out_features], optional

    Returns
    -------
    Tensor [..., out_features]
        In the dtype of `x`.
    """
    if weight.dtype != torch.bfloat16 or x.shape[:-1].numel() < FEWEST:
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and weight.requires_grad:
        return functional.linear(x, weight, bias)  # nobody trains weights here
    return InFloat32.apply(x, weight, bias)


class InFloat32(torch.autograd.Function):
    """The product, whose graph holds the weight as it is; torch's own would hold each strip in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What `linear` returns."""
        ctx.save_for_backward(weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of `x`."""
        (weight,) = ctx.saved_tensors
        return _product(gradient, weight.T, None), None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, out = x.float(), x.new_empty(*x.shape[:-1], len(weight))
    for first in range(0, len(weight), STRIP):
        rows = slice(first, first + STRIP)
        out[..., rows] = functional.linear(wide, weight[rows].float(), None if bias is None else bias[rows].float())
    return out


def needed(dtype: torch.dtype) -> bool:
    """Whether a model of this dtype is slow here without `linear`."""
    return dtype == torch.bfloat16 and not torch.cuda.is_available() and lacks_bfloat16()


def chosen_in(model: nn.Module) -> None:
    """Let the linear layers of a transformers model compute by `linear` where that is needed."""
    if needed(model.dtype):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


def are_chosen_in(model: nn.Module) -> bool:
    """Whether a transformers model computes by `linear`."""
    return any(isinstance(module, Linear) for module in model.modules())


@contextmanager
def chosen_by_vllm() -> Iterator[None]:
    """Let models that vLLM loads inside a `with` block compute by `linear` where that is needed."""
    from vllm.model_executor.layers import utils

    own, slow = utils.dispatch_cpu_unquantized_gemm, needed(torch.bfloat16)

    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        if slow and layer.weight.ndim == 2 and layer.weight.dtype == torch.bfloat16:
            layer.cpu_linear = linear
        else:
            own(layer, remove_weight)

    with patch.object(utils, "dispatch_cpu_unquantized_gemm", dispatch):
        yield

"""The interface that every engine implements: token ids in, full-vocabulary logits out, K and V on tap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from kvlab.errors import NonFinite
from kvlab.model import ModelInfo

Part = Literal["q", "k", "v"]


class Tap(Protocol):
    """What sits on the projections of every attention layer, before the rotary embedding.

    Called once per layer and part with a tensor of shape (heads, tokens, head_dim) in the engine's
    dtype. The tensor that it returns takes the place of the one it was given; None leaves it alone.
    """

    def __call__(self, layer: int, part: Part, x: torch.Tensor) -> torch.Tensor | None:
        """Look at `x`, and return its replacement or None."""


class Engine(ABC):
    """A loaded model that scores token windows.

    Parameters
    ----------
    info : ModelInfo
        The model.
    dtype : str
        ``float32`` or ``bfloat16``; weights, activations and cache.
    """

    name: str
    attention: str

    def __init__(self, info: ModelInfo, dtype: str):
        self.info, self.dtype = info, dtype

    @property
    @abstractmethod
    def device(self) -> str:
        """The device in words: ``cpu``, or the accelerator's name."""

    @abstractmethod
    def score(self, ids: Sequence[int], first: int, tap: Tap | None = None) -> torch.Tensor:
        """Logits of one window in a single forward pass.

        Parameters
        ----------
        ids : sequence of int
            The window's tokens.
        first : int
            First position whose logits are wanted.
        tap : Tap, optional
            Sees, and may replace, pre-rotary Q, K and V of every layer.

        Returns
        -------
        torch.Tensor, shape (len(ids) - 1 - first, vocab_size)
            Row i predicts ``ids[first + i + 1]`` from everything before it.
        """

    def close(self) -> None:  # noqa: B027 (an engine that holds nothing has nothing to give back)
        """Give the model's memory back."""


def refuse_broken_weights(model: torch.nn.Module, info: ModelInfo) -> None:
    """`NonFinite` names the first weight that holds NaN or infinity."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise NonFinite(f"weight {name!r} of {info.path} holds NaN or infinity")

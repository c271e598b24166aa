"""What every codec is: it encodes a tensor at a site into stored tensors, and decodes only from those."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kvlab.codec.whitening import Whitener
from kvlab.errors import CodecNotActive, NonFinite


@dataclass(frozen=True)
class Site:
    """Where a tensor was taken: which window, which layer, which stream."""

    window: int
    layer: int
    stream: Literal["k", "v"]


@dataclass(frozen=True)
class Stats:
    """What one `encode` did, in the codec's own (whitened) domain.

    Parameters
    ----------
    d_eff : tuple of int
        Stored rank of each block; empty for a codec without blocks.
    n_outliers, n_coefficients : int
        Coefficients stored apart, and all coefficients that were quantised (padding included).
    error_sq : float
        Sum of squared errors.
    signal_sq : float
        Sum of squares about the mean of each block.
    """

    d_eff: tuple[int, ...] = ()
    n_outliers: int = 0
    n_coefficients: int = 0
    error_sq: float = 0.0
    signal_sq: float = 0.0

    def __add__(self, other: Stats) -> Stats:
        """Both together."""
        return Stats(
            self.d_eff + other.d_eff,
            self.n_outliers + other.n_outliers,
            self.n_coefficients + other.n_coefficients,
            self.error_sq + other.error_sq,
            self.signal_sq + other.signal_sq,
        )


@dataclass(frozen=True)
class Encoded:
    """What `encode` leaves behind. Every tensor in a field of it is stored, and counted."""

    packed: ClassVar[bool] = True
    """False when nothing is compressed, so that `nbytes` says nothing about storage."""

    stats: Stats

    def tensors(self) -> list[Tensor]:
        """The stored tensors, in the order of the fields."""
        return tensors_of(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(tensor.element_size() * tensor.numel() for tensor in self.tensors())


@dataclass(frozen=True)
class StreamCalibration:
    """What was fitted for one stream: a whitener per layer, and the Lloyd-Max table [2**bits]."""

    whiteners: dict[int, Whitener]
    centroids: Tensor | None


class Codec(Protocol):
    """Codes [heads, tokens, head_dim] tensors of any float dtype on any device."""

    def encode(self, x: Tensor, site: Site) -> Encoded:
        """Code `x`; `NonFinite` when it holds NaN or infinity."""
        ...

    def decode(self, encoded: Encoded) -> Tensor:
        """What the stored tensors say, float32 [heads, tokens, head_dim]."""
        ...


def tensors_of(value: object) -> list[Tensor]:
    """All tensors in a nest of dataclasses, tuples and lists, depth first."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_of(item)]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors_of(getattr(value, field.name))]
    return []


def checked(x: Tensor, site: Site) -> Tensor:
    """`x` as float32 without gradient.

    Raises
    ------
    NonFinite
        When `x` holds NaN or infinity; names layer and stream.
    CodecNotActive
        When `x` is empty.
    """
    if x.numel() == 0:
        raise CodecNotActive(f"layer {site.layer} {site.stream}: no values to code in window {site.window}")
    x = x.detach().to(torch.float32)
    if not torch.isfinite(x).all():
        raise NonFinite(
            f"layer {site.layer} {site.stream}: NaN or infinity came into the codec in window {site.window}"
        )
    return x


def sum_sq(x: Tensor) -> float:
    """Sum of squares, accumulated in float64."""
    flat = x.double().flatten()
    return torch.dot(flat, flat).item()


def spread_sq(x: Tensor) -> float:
    """Sum of squares of [blocks, rows, dims] about the mean of each block."""
    x = x.double()
    return sum_sq(x - x.mean(dim=1, keepdim=True))

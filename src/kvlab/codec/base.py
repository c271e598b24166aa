"""What every codec is: it encodes a tensor at a site into stored tensors, and decodes only from those."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kvlab.codec.whitening import Whitener
from kvlab.errors import CodecNotActive, NonFinite, StreamError

if TYPE_CHECKING:
    from kvlab.codec.components import Components


@dataclass(frozen=True)
class Site:
    """Where a tensor was taken: which window, which layer, which stream."""

    window: int
    layer: int
    stream: Literal["k", "v"]


@dataclass(frozen=True)
class Stats:
    """What one `encode` did.

    Parameters
    ----------
    d_eff : tuple of int
        Stored rank of each block; empty for a codec without ranks.
    n_outliers, n_coefficients : int
        Coefficients stored apart, and all coefficients that were quantised (padding included).
    """

    d_eff: tuple[int, ...] = ()
    n_outliers: int = 0
    n_coefficients: int = 0

    def __add__(self, other: Stats) -> Stats:
        """Both together."""
        return Stats(
            self.d_eff + other.d_eff,
            self.n_outliers + other.n_outliers,
            self.n_coefficients + other.n_coefficients,
        )


Arrays = tuple[Tensor, ...]


@dataclass(frozen=True)
class Encoded:
    """One coded tensor: parallel arrays per block, which `bitstream` writes down as they are.

    Parameters
    ----------
    shape : tuple of int
        heads, tokens, head_dim of the tensor.
    layer : int
        Where it was taken.
    stream : {"k", "v"}
        The same.
    shared : tuple of Tensor
        Arrays that every block needs; most codecs have none.
    blocks : tuple of tuple of Tensor
        Arrays of each block. With `shared` and the recipe they decode without the other blocks.
    stats : Stats
        What the encoder saw; not stored.
    packed : bool
        False when nothing is compressed, so that the arrays say nothing about storage.
    """

    shape: tuple[int, int, int]
    layer: int
    stream: Literal["k", "v"]
    shared: Arrays
    blocks: tuple[Arrays, ...]
    stats: Stats = Stats()
    packed: bool = True

    def to(self, device: torch.device | str) -> Encoded:
        """The same arrays on another device."""
        moved = [tuple(array.to(device) for array in arrays) for arrays in (self.shared, *self.blocks)]
        return replace(self, shared=moved[0], blocks=tuple(moved[1:]))


@dataclass(frozen=True)
class StreamCalibration:
    """What was fitted for one stream, by layer; a codec reads what its recipe asks for.

    Parameters
    ----------
    whiteners : dict of int to Whitener
        Cholesky factor of Sigma_q (K only).
    centroids : Tensor or None
        Lloyd-Max table [2**bits] of the block codec.
    components : dict of int to Components
        Mean, covariance and KLT of the stream.
    """

    whiteners: dict[int, Whitener] = field(default_factory=dict)
    centroids: Tensor | None = None
    components: dict[int, Components] = field(default_factory=dict)


class Codec(Protocol):
    """Codes [heads, tokens, head_dim] tensors of any float dtype on any device.

    `per_token` says that a token's code depends on no other token: such a codec gives the same decoded
    tensor however the tokens are cut into calls, and may sit where tokens of several requests mix.
    """

    per_token: ClassVar[bool]

    def encode(self, x: Tensor, site: Site) -> Encoded:
        """Code `x`; `NonFinite` when it holds NaN or infinity."""
        ...

    def decode(self, encoded: Encoded) -> Tensor:
        """What the stored arrays say, float32 [heads, tokens, head_dim]; `StreamError` when they cannot be."""
        ...

    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """One block alone: its place, so that ``x[place]`` is what it codes, and the decoded values."""
        ...


Place = tuple[slice | Tensor, slice | Tensor]
"""Index of heads and index of tokens into [heads, tokens, head_dim]."""


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
    if not torch.isfinite(torch.stack(x.aminmax())).all():  # NaN comes out of it as NaN
        raise NonFinite(
            f"layer {site.layer} {site.stream}: NaN or infinity came into the codec in window {site.window}"
        )
    return x


def stored(arrays: Arrays, *expected: tuple[torch.dtype, tuple[int | None, ...]]) -> Arrays:
    """`arrays`, of which there must be as many as expected, each of its dtype and shape (None: any length).

    A stream may be forged and still have right checksums; a decoder looks at what it reads before it
    computes or allocates with it.

    Raises
    ------
    StreamError
        On the first array that is not what the recipe says.
    """
    if len(arrays) != len(expected):
        raise StreamError(f"{len(arrays)} arrays where the recipe stores {len(expected)}")
    for number, (array, (dtype, shape)) in enumerate(zip(arrays, expected, strict=True)):
        fits = len(array.shape) == len(shape) and all(
            want in (None, have) for have, want in zip(array.shape, shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            raise StreamError(
                f"array {number} is {array.dtype} {list(array.shape)} where the recipe stores {dtype} {list(shape)}"
            )
    return arrays

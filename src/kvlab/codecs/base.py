"""What every codec is: it encodes a tensor at a site into stored tensors, and decodes only from those."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.errors import CalibrationMismatch, CodecNotActive, NonFinite, StreamError, UserError

if TYPE_CHECKING:
    from kvlab.codecs.shared.components import Components


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
    own : dict
        By layer, what the codec's own `Fit.of` made of the stream's sample; an object of the codec's class `Fit`.
    stream : {"k", "v"} or None
        Which one it is; None where that does not matter.
    spectra : dict of tuple of str and int to Tensor
        By stream and layer the variances of all components of the cache, `Components.variance`: what bits are
        divided by.
    biases : dict of int to Tensor
        By layer, the projection's bias [heads, head_dim], where `center` asks for it.
    outputs : dict of int to Tensor
        By layer, second moments of what attention makes of V [kv_heads, head_dim, head_dim] (V only).
    """

    whiteners: dict[int, Whitener] = field(default_factory=dict)
    centroids: Tensor | None = None
    components: dict[int, Components] = field(default_factory=dict)
    own: dict[int, Any] = field(default_factory=dict)
    stream: Literal["k", "v"] | None = None
    spectra: dict[tuple[Literal["k", "v"], int], Tensor] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)


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
    UserError
        When `x` is not a floating tensor of three dimensions.
    NonFinite
        When `x` holds NaN or infinity; names layer and stream.
    CodecNotActive
        When `x` is empty.
    """
    x = shaped(x, site)
    if not all_finite(x):
        raise NonFinite(
            f"layer {site.layer} {site.stream}: NaN or infinity came into the codec in window {site.window}"
        )
    return x


def shaped(x: Tensor, site: Site) -> Tensor:
    """`checked`, for a codec that finds NaN and infinity on its way."""
    if x.ndim != 3 or not x.is_floating_point():
        raise UserError(
            f"layer {site.layer} {site.stream}: a codec takes floating [heads, tokens, head_dim], given is"
            f" {x.dtype} {list(x.shape)}",
            code="user.tensor",
        )
    if x.numel() == 0:
        raise CodecNotActive(
            f"layer {site.layer} {site.stream}: no values to code in window {site.window}", code="not-active.no-values"
        )
    return x.detach().to(torch.float32)


def fitting(rows: Tensor, site: Site) -> Tensor:
    """`rows` in the codec's domain; `NonFinite` when mean removal or whitening took large values out of float32."""
    if not all_finite(rows):
        raise NonFinite(
            f"layer {site.layer} {site.stream}: values so large that they do not fit float32 without their mean, or "
            f"whitened, in window {site.window}; leave the layer uncoded, or add it to whiten_skip_layers",
            code="non-finite.too-large",
        )
    return rows


def block_index(encoded: Encoded, index: int) -> int:
    """`index`, which must be that of one of the blocks; `IndexError` otherwise, also below 0."""
    if not 0 <= index < len(encoded.blocks):
        raise IndexError(f"block {index} of {len(encoded.blocks)}; allowed: 0..{len(encoded.blocks) - 1}")
    return index


def all_finite(values: Tensor) -> bool:
    """Whether nothing in a float tensor is NaN or infinite."""
    return values.numel() == 0 or bool(torch.isfinite(torch.stack(values.aminmax())).all())  # NaN comes out as NaN


def finite(values: Tensor, what: str) -> Tensor:
    """Stored floats `values`; `StreamError` names `what` when they hold NaN or infinity, which no encoder writes."""
    if not all_finite(values):
        raise StreamError(f"{what} holds NaN or infinity, which no encoder writes", code="stream.non-finite")
    return values


def uncalibrated(encoded: Encoded, error: CalibrationMismatch) -> StreamError:
    """What a decoder says of a tensor that its calibration is not for: whoever decodes did not choose its shape."""
    heads, _, head_dim = encoded.shape
    return StreamError(
        f"the stream names layer {encoded.layer} {encoded.stream} of {heads} KV heads of {head_dim} dimensions, which"
        f" the calibration that was given does not decode; decode with the one that it was coded with ({error})",
        code="stream.other-calibration",
    )


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

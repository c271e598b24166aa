"""The settings of the codecs that stand beside the project's own, and what all settings share. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

MOST_BITS = 8
Bits = Annotated[int, Field(ge=1, le=MOST_BITS)]
"""Of a codec with a table for each width; of both streams where one number is given."""


class Frozen(BaseModel):
    """A value: immutable, and closed against unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


WHOLE = ("archive", "kvtc", "aquakv")
"""Codecs that code all layers of a cache at once."""
SILENT = {"sink": 0, "recent": 0, "ragged": "coded"}


def without(said: dict[str, Any], silent: dict[str, Any]) -> dict[str, Any]:
    """`said` less what it says of settings that came later, where they are as they were before there was a choice."""
    return {name: value for name, value in said.items() if name not in silent or value != silent[name]}


class Ends(Frozen):
    """What every storing codec may leave as it is: tokens at both ends of a cache, in 16 bits.

    `sink` counts the first tokens and `recent` the last ones. ``ragged: exact`` also keeps, at the end, those that
    fill no block of `block_size` tokens, which a codec that codes tokens together would code in a shorter group.
    A recipe says nothing of the three where they are the default, so that ids are those of before there was a choice.
    """

    sink: int = Field(default=0, ge=0, le=65536)
    recent: int = Field(default=0, ge=0, le=65536)
    ragged: Literal["coded", "exact"] = "coded"

    @model_serializer(mode="wrap")
    def _said(self, whole) -> dict[str, Any]:
        return without(whole(self), SILENT)


class Conditioned(Ends):
    """What every codec of the ladder may have before it, calibrated: mean removal and whitening.

    `center` subtracts the calibrated mean of each head, `whiten` (K only) multiplies by the Cholesky
    factor of Sigma_q except on `whiten_skip_layers`; neither stores anything per tensor. `weigh` multiplies K and V
    by the Cholesky factor of what their errors are weighed by (`codec.metric`: Sigma_q averaged over lags, and
    W_o^T W_o), which is the metric of `klt`. `block_size` is the number of tokens of a stored block.
    """

    center: bool = False
    whiten: bool = False
    whiten_skip_layers: tuple[int, ...] = ()
    block_size: int = Field(default=512, ge=1, le=65536)
    weigh: bool = False

    @model_validator(mode="after")
    def _one_metric(self):
        if self.weigh and self.whiten:
            raise ValueError("whiten and weigh are two metrics for one error; ask for one of them")
        return self

    @model_serializer(mode="wrap")
    def _said_beside(self, whole) -> dict[str, Any]:
        return without(whole(self), SILENT | {"weigh": False})


class IntStream(Conditioned):
    """Round to nearest on an asymmetric grid per `group` of neighbouring channels of one token."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.int_groups:IntCodec"
    codec: Literal["int"] = "int"
    bits: Bits
    group: int = Field(default=64, ge=2, le=65536)


class KiviStream(Conditioned):
    """KIVI: asymmetric integers, K in groups of `group` tokens per channel, V per token."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.kivi:KiviCodec"
    codec: Literal["kivi"] = "kivi"
    bits: Bits
    axis: Literal["channel", "token"]
    group: int = Field(default=64, ge=2, le=65536)


class HadamardStream(Conditioned):
    """Norm, randomised Walsh-Hadamard rotation, Gaussian Lloyd-Max table: the TurboQuant family."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.hadamard:HadamardCodec"
    codec: Literal["hadamard"] = "hadamard"
    bits: Bits
    seed: int = Field(default=3405691582, ge=0)


class OscarStream(Conditioned):
    """OSCAR: eigenvectors of the query covariance, Hadamard, clipping, group scales.

    `follow` says whether V is rotated by its own second moment, or by that of what attention makes of it.
    """

    built_by: ClassVar[str] = "kvlab.codec.ladder.oscar:OscarCodec"
    codec: Literal["oscar"] = "oscar"
    bits: Bits
    group: int = Field(default=64, ge=2, le=65536)
    clip: float = Field(default=0.96, gt=0, le=1)
    follow: Literal["values", "outputs"] = "values"

    @model_serializer(mode="wrap")
    def _said_besides(self, whole) -> dict[str, Any]:
        return without(whole(self), SILENT | {"weigh": False, "follow": "values"})


class Fp8Stream(Conditioned):
    """Each value rounded to 8-bit floating point (4 exponent and 3 mantissa bits).

    There is one scale per head and block.
    """

    built_by: ClassVar[str] = "kvlab.codec.ladder.fp8:Fp8Codec"
    codec: Literal["fp8"] = "fp8"


class Nf4Stream(Conditioned):
    """NormalFloat of 4 bits, with a scale per `group` of neighbouring channels of one token."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.nf4:Nf4Codec"
    codec: Literal["nf4"] = "nf4"
    group: int = Field(default=64, ge=2, le=65536)


class D4Stream(Conditioned):
    """Norm, Hadamard rotation, nearest point of the D4 lattice in as many points as `bits` can index."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.d4:D4Codec"
    codec: Literal["d4"] = "d4"
    bits: Bits
    seed: int = Field(default=3405691582, ge=0)


class E8Stream(Conditioned):
    """Norm, Hadamard rotation, nearest point of the E8 lattice in as many points as `bits` can index."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.e8:E8Codec"
    codec: Literal["e8"] = "e8"
    bits: Bits
    seed: int = Field(default=3405691582, ge=0)


class TurboQuantStream(Conditioned):
    """TurboQuant as vLLM runs it on K: norm, Hadamard, Lloyd-Max table, `norm_correction` when it is read back."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.turboquant:TurboQuantCodec"
    codec: Literal["turboquant"] = "turboquant"
    bits: Bits
    norm_correction: bool = True


class KvQuantStream(Ends):
    """KVQuant: a table of any shape per layer, K scaled per channel and V per token, 1 % outliers stored apart."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.kvquant:KvQuantCodec"
    codec: Literal["kvquant"] = "kvquant"
    bits: Annotated[int, Field(ge=1, le=6)]
    axis: Literal["channel", "token"]
    block_size: int = Field(default=512, ge=1, le=65536)


class KvtcStream(Ends):
    """KVTC: PCA over the heads of all layers, widths by dynamic programming, DEFLATE of the codes; whole caches.

    `bits` are those of a coded value before DEFLATE; `block_size` tokens are deflated together.
    """

    built_by: ClassVar[str] = "kvlab.codec.whole.kvtc:KvtcCodec"
    codec: Literal["kvtc"] = "kvtc"
    bits: float = Field(gt=0, le=8)
    block_size: int = Field(default=4096, ge=1, le=65536)


class AquaKvStream(Ends):
    """AQUA-KV: layers predicted from those below, what is left in a Gaussian grid of words of `dim`; whole caches.

    `bits` is a multiple of 1 / `dim`, and takes one norm of 16 bits per token beside it. The first layer, which nothing
    predicts, has `first_bits` where these are more.
    """

    built_by: ClassVar[str] = "kvlab.codec.whole.aquakv:AquaKvCodec"
    codec: Literal["aquakv"] = "aquakv"
    bits: float = Field(ge=1, le=4)
    first_bits: float = Field(default=4, ge=1, le=4)
    dim: Literal[2, 4] = 2

    @model_validator(mode="after")
    def _has_a_grid(self):
        for bits, dim in ((self.bits, self.dim), (self.first_bits, 2)):
            if bits * dim != int(bits * dim) or bits * dim > 8:
                most = f"{8 / dim:g}"
                raise ValueError(
                    f"bits {bits:g} have no grid of words of {dim}; allowed: multiples of {1 / dim:g} to {most}"
                )
        return self


class ArchiveStream(Frozen):
    """The codec to keep a cache with: layers predicted from those below, entropy coded; K and V of all layers at once.

    One of the two is asked for: `bits`, which the stored cache takes per value, everything included, within 1 %; or
    `quality`, in 64ths of an octave, of which each octave halves every step. `block_size` tokens decode alone.
    """

    built_by: ClassVar[str] = "kvlab.codec.archive.codec:ArchiveCodec"
    codec: Literal["archive"] = "archive"
    bits: float | None = Field(default=None, gt=0, le=16)
    quality: int | None = Field(default=None, ge=128, lt=1600)
    block_size: int = Field(default=128, ge=1, le=65535)

    @model_validator(mode="after")
    def _asked_for_one(self):
        if (self.bits is None) == (self.quality is None):
            raise ValueError("archive takes bits or quality, one of them")
        return self

    @model_serializer(mode="wrap")
    def _said(self, whole) -> dict[str, Any]:
        return without(whole(self), {"bits": None, "quality": None})


class NoiseStream(Frozen):
    """Gaussian noise of `sigma` times the tensor's rms, added where a codec would sit."""

    built_by: ClassVar[str] = "kvlab.codec.controls.noise:NoiseCodec"
    codec: Literal["noise"] = "noise"
    sigma: float = Field(ge=0)
    seed: int = Field(ge=0)


class CastStream(Frozen):
    """Each value rounded to `dtype` and back: what an engine of that dtype does to K and V by itself."""

    built_by: ClassVar[str] = "kvlab.codec.controls.cast:CastCodec"
    codec: Literal["cast"] = "cast"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"

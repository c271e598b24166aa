"""What a codec does (`Recipe`) and where it does it (`Cell`), as values with identities.

A recipe is canonical JSON; its sha256 is the `recipe_id` that every result row carries. Two numbers
may be compared only when the ids of everything outside the compared factor are equal.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal, Union, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from kvlab.base.errors import suggestion

Engine = Literal["hf", "vllm"]
DType = Literal["float32", "bfloat16"]
Protocol = Literal["in_forward", "snapshot"]
Stream = Literal["k", "v", "kv"]
Text = Literal["test", "other", "calib"]
Attention = Literal["default", "eager", "sdpa"]  # `default`: what the engine's cells run with
Placement = Literal["pre_rope", "post_rope"]  # K is coded before or after its rotary embedding
Span = Literal["context", "window"]  # which tokens are coded: the context, or the scored ones too

MOST_BITS = 8
Bits = Annotated[int, Field(ge=1, le=MOST_BITS)]
"""Of a codec with a table for each width; of both streams where one number is given."""

ID_LENGTH = 12
RECIPE_VARIABLE = "KVLAB_RECIPE"  # names the file of the recipe that the vLLM plugin runs


class Frozen(BaseModel):
    """A value: immutable, and closed against unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class IdentityStream(Frozen):
    """The stream passes through the codec's place unchanged."""

    built_by: ClassVar[str] = "kvlab.codec.controls.identity:IdentityCodec"
    codec: Literal["identity"] = "identity"


class BlockSettings(Frozen):
    """What K and V of the block codec share: PCA, spherical k-means, rotation, Lloyd-Max."""

    variance_ratio: float = Field(default=1.0, gt=0, le=1, description="energy kept by the PCA, relative to its sketch")
    block_size: int = Field(default=512, ge=2, le=65536, description="vectors per block")
    layout: Literal["per_head", "mixed_heads"] = Field(
        default="per_head", description="which vectors share a block; the published one is `mixed_heads`"
    )
    n_centres: int = Field(default=16, ge=1, le=256, description="spherical k-means centres")
    kmeans_iterations: int = Field(default=32, ge=0, description="Lloyd rounds at most")
    pca: Literal["exact", "randomized"] = Field(default="randomized", description="PCA method")
    exact_rank_cap: int | None = Field(default=None, ge=1, description="largest rank of the exact PCA; null for none")
    rank_fraction: float = Field(default=0.5, gt=0, le=1, description="target rank of the randomised PCA, of head_dim")
    oversample: int = Field(default=8, ge=0, description="extra columns of the sketch")
    power_iterations: int = Field(default=2, ge=0, description="subspace iterations of the sketch")
    skeleton: Literal["fp16", "fp32"] = Field(
        default="fp16", description="precision of mean, basis, centres, gains and norms"
    )
    seed: int = Field(default=3405691582, ge=0, description="signs of the rotation, k-means start, sketch")


class BlockStream(BlockSettings):
    """One stream of the block codec.

    `whiten` is for K only, `codebook` says whether the Lloyd-Max table is the Gaussian one or fitted on the
    calibration split. `metric` is what the published encoder was told; it decides something in the emulated
    published decoder alone.
    """

    built_by: ClassVar[str] = "kvlab.codec.block.codec:BlockCodec"
    codec: Literal["block"] = "block"
    bits: Bits
    outlier_threshold: float | None = Field(default=None, gt=0)
    share_basis: bool
    whiten: bool
    whiten_skip_layers: tuple[int, ...] = ()
    codebook: Literal["gaussian", "fitted"]
    metric: Literal["mse", "inner_product", "linf"] = "mse"
    emulate_published_decoder: bool = False


class NoiseStream(Frozen):
    """Gaussian noise of `sigma` times the tensor's rms, added where a codec would sit."""

    built_by: ClassVar[str] = "kvlab.codec.controls.noise:NoiseCodec"
    codec: Literal["noise"] = "noise"
    sigma: float = Field(ge=0)
    seed: int = Field(ge=0)


class Conditioned(Frozen):
    """What every codec of the ladder may have before it, calibrated: mean removal and whitening.

    `center` subtracts the calibrated mean of each head, `whiten` (K only) multiplies by the Cholesky
    factor of Sigma_q except on `whiten_skip_layers`; neither stores anything per tensor. `block_size`
    is the number of tokens of a stored block.
    """

    center: bool = False
    whiten: bool = False
    whiten_skip_layers: tuple[int, ...] = ()
    block_size: int = Field(default=512, ge=1, le=65536)


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
    """OSCAR: eigenvectors of the query covariance, Hadamard, clipping, group scales."""

    built_by: ClassVar[str] = "kvlab.codec.ladder.oscar:OscarCodec"
    codec: Literal["oscar"] = "oscar"
    bits: Bits
    group: int = Field(default=64, ge=2, le=65536)
    clip: float = Field(default=0.96, gt=0, le=1)


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


class KltStream(Frozen):
    """The calibrated transform codec: KLT in the metric of the scores, bits by reverse water-filling.

    `bits` is what a full block of `block_size` tokens may take per value, everything stored included.
    With `escape` a component that falls so far out of its table that storing it apart is the better
    bargain is stored apart.
    """

    built_by: ClassVar[str] = "kvlab.codec.klt.codec:KltCodec"
    codec: Literal["klt"] = "klt"
    bits: float = Field(gt=0, le=8)
    block_size: int = Field(default=512, ge=1, le=65536)
    escape: bool = True


class CastStream(Frozen):
    """Each value rounded to `dtype` and back: what an engine of that dtype does to K and V by itself."""

    built_by: ClassVar[str] = "kvlab.codec.controls.cast:CastCodec"
    codec: Literal["cast"] = "cast"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"


class IsotropicStream(Frozen):
    """A codec's error replaced by white Gaussian noise of the same norm, token by token and head by head.

    What the codec's error costs beyond this is due to its direction, not to its size.
    """

    built_by: ClassVar[str] = "kvlab.codec.controls.isotropic:IsotropicCodec"
    codec: Literal["isotropic"] = "isotropic"
    of: Annotated[BlockStream | KltStream, Field(discriminator="codec")]
    seed: int = Field(ge=0)


class PluginStream(Frozen):
    """One stream of a codec of another package, which `kvlab.base.plugins` finds by its entry point.

    Every other field is one of that codec's own settings, all of them, defaults included. Name and version of the
    package are in the identity of the recipe, so that two versions of a codec are two codecs.

    Parameters
    ----------
    codec : str
        The name of the entry point.
    package, version : str
        The distribution that it came with.
    reads : tuple of {"whitener", "components"}
        What the codec reads of a calibration besides what `center` and `whiten` ask for.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    codec: str
    package: str
    version: str
    reads: tuple[Literal["whitener", "components"], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """A name that is no codec of kvlab's, without a package that it could be of, is a mistake."""
        if not isinstance(data, dict) or "package" in data:
            return data
        name, allowed = data.get("codec"), ", ".join(STREAMS)
        if not isinstance(name, str):
            raise ValueError(f"no codec is named; allowed: {allowed}")
        raise ValueError(f"codec {name!r} is not known; allowed: {allowed}{suggestion(name, STREAMS)}")

    @property
    def settings(self) -> dict[str, Any]:
        """The codec's own settings."""
        return dict(self.__pydantic_extra__ or {})


CONTROLS = ("identity", "noise", "cast", "isotropic")
"""What sits in a codec's place without being one."""

AnyStream = (
    IdentityStream
    | KltStream
    | HadamardStream
    | KiviStream
    | OscarStream
    | IntStream
    | D4Stream
    | E8Stream
    | BlockStream
    | Fp8Stream
    | Nf4Stream
    | NoiseStream
    | CastStream
    | IsotropicStream
)
STREAMS: dict[str, type[Frozen]] = {stream.model_fields["codec"].default: stream for stream in get_args(AnyStream)}
"""The settings of every codec of kvlab's, by its name."""


def _kind(stream: Any) -> str:
    """Which of the models below a stream is of: by its codec's name, and else a codec of another package."""
    name = stream.get("codec") if isinstance(stream, dict) else getattr(stream, "codec", None)
    return name if isinstance(name, str) and name in STREAMS else "plugin"


StreamRecipe = Annotated[
    Union[tuple(Annotated[m, Tag(n)] for n, m in (STREAMS | {"plugin": PluginStream}).items())],  # noqa: UP007
    Discriminator(_kind),
]
"""What is done to one stream."""


def canonical(value: BaseModel | dict) -> str:
    """Canonical JSON: sorted keys, no spaces; equal values give equal text."""
    data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: BaseModel | dict) -> str:
    """First 12 hexadecimal digits of the sha256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:ID_LENGTH]


class Recipe(Frozen):
    """Everything that decides what a codec does to K and to V."""

    k: StreamRecipe
    v: StreamRecipe

    @property
    def recipe_id(self) -> str:
        """Identity of the recipe."""
        return digest(self)


class LayerRecipe(Frozen):
    """A recipe for some layers only."""

    layers: tuple[int, ...] = Field(min_length=1)
    recipe: Recipe


class Cell(Frozen):
    """One measurement: an engine, a dtype and a protocol, a recipe, the coded layers and streams.

    Parameters
    ----------
    label : str
        A readable name inside its study; not part of the identity.
    attention : Attention
        The engine's attention implementation.
    placement : Placement
        Whether K is coded before its rotary embedding or after it.
    span : Span
        Which tokens of a window are coded.
    origin : Engine
        Whose capture fitted the calibration that the codec reads, if it reads any.
    layers : tuple of int
        Those that are coded.
    exceptions : tuple of LayerRecipe
        Coded layers whose recipe is not `recipe`.
    text : Text
        Which windows are scored: those of the test split, of the other text, or of the calibration split (to
        choose by, never to report).
    """

    study: str
    label: str
    engine: Engine
    dtype: DType
    attention: Attention = "default"
    protocol: Protocol
    placement: Placement = "pre_rope"
    span: Span = "context"
    origin: Engine
    stream: Stream
    layers: tuple[int, ...]
    windows: int = Field(ge=1)
    text: Text = "test"
    recipe: Recipe
    exceptions: tuple[LayerRecipe, ...] = ()

    @property
    def recipe_id(self) -> str:
        """Identity of the recipe."""
        return self.recipe.recipe_id

    @property
    def cell_id(self) -> str:
        """Identity of the cell: of everything but its label."""
        return digest(self.model_dump(mode="json", exclude={"label"}))

    def stream_recipe(self, stream: Literal["k", "v"], layer: int | None = None) -> StreamRecipe:
        """The recipe of one stream, of `layer` if given; identity when the cell does not code that stream."""
        if stream not in self.stream:
            return IdentityStream()
        own = [special.recipe for special in self.exceptions if layer in special.layers]
        recipe = own[0] if own else self.recipe
        return recipe.k if stream == "k" else recipe.v

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """All recipes that it runs, that of most layers first."""
        return (self.recipe, *(special.recipe for special in self.exceptions))


IDENTITY = Recipe(k=IdentityStream(), v=IdentityStream())

"""What a codec does (`Recipe`) and where it does it (`Cell`), as values with identities.

A recipe is canonical JSON; its sha256 is the `recipe_id` that every result row carries. Two numbers
may be compared only when the ids of everything outside the compared factor are equal.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Engine = Literal["hf", "vllm"]
DType = Literal["float32", "bfloat16"]
Protocol = Literal["in_forward", "snapshot"]
Stream = Literal["k", "v", "kv"]
Text = Literal["test", "other", "calib"]
Attention = Literal["default", "eager", "sdpa"]  # `default`: what the engine's cells run with
Placement = Literal["pre_rope", "post_rope"]  # K is coded before or behind its rotary embedding
Span = Literal["context", "window"]  # which tokens are coded: the context, or the scored ones too
Study = Literal["factors", "cells", "layers", "noise", "mitigations", "ladder", "mechanisms"]

ID_LENGTH = 12
RECIPE_VARIABLE = "KVLAB_RECIPE"  # names the file of the recipe that the vLLM plugin runs


class Frozen(BaseModel):
    """A value: immutable, and closed against unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class IdentityStream(Frozen):
    """The stream passes through the codec's place unchanged."""

    codec: Literal["identity"] = "identity"


class BlockStream(Frozen):
    """One stream of the block codec: PCA, spherical k-means, rotation, Lloyd-Max, outliers.

    Fields are named as in ``params.yaml``; `whiten` is for K only and `codebook` says whether the
    Lloyd-Max table is the Gaussian one or fitted on the calibration split.
    """

    codec: Literal["block"] = "block"
    bits: int = Field(ge=1, le=8)
    variance_ratio: float = Field(gt=0, le=1)
    block_size: int = Field(ge=2, le=65536)
    layout: Literal["per_head", "mixed_heads"]
    n_centres: int = Field(ge=1, le=256)
    kmeans_iterations: int = Field(ge=0)
    pca: Literal["exact", "randomized"]
    rank_fraction: float = Field(gt=0, le=1)
    oversample: int = Field(ge=0)
    power_iterations: int = Field(ge=0)
    skeleton: Literal["fp16", "fp32"]
    outlier_threshold: float | None = Field(default=None, gt=0)
    share_basis: bool
    whiten: bool
    whiten_skip_layers: tuple[int, ...] = ()
    codebook: Literal["gaussian", "fitted"]
    metric: Literal["mse", "inner_product", "linf"] = "mse"
    exact_rank_cap: int | None = Field(default=None, ge=1)
    seed: int = Field(ge=0)
    emulate_published_decoder: bool = False


class NoiseStream(Frozen):
    """Gaussian noise of `sigma` times the tensor's rms, added where a codec would sit."""

    codec: Literal["noise"] = "noise"
    sigma: float = Field(ge=0)
    seed: int = Field(ge=0)


class Conditioned(Frozen):
    """What every codec of the ladder may have in front of it, calibrated: mean removal and whitening.

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

    codec: Literal["int"] = "int"
    bits: int = Field(ge=1, le=8)
    group: int = Field(default=64, ge=2, le=65536)


class KiviStream(Conditioned):
    """KIVI: asymmetric integers, K in groups of `group` tokens per channel, V per token."""

    codec: Literal["kivi"] = "kivi"
    bits: int = Field(ge=1, le=8)
    axis: Literal["channel", "token"]
    group: int = Field(default=64, ge=2, le=65536)


class HadamardStream(Conditioned):
    """Norm, randomised Walsh-Hadamard rotation, Gaussian Lloyd-Max table: the TurboQuant family."""

    codec: Literal["hadamard"] = "hadamard"
    bits: int = Field(ge=1, le=8)
    seed: int = Field(default=3405691582, ge=0)


class OscarStream(Conditioned):
    """OSCAR: eigenvectors of the query covariance, Hadamard, clipping, group scales."""

    codec: Literal["oscar"] = "oscar"
    bits: int = Field(ge=1, le=8)
    group: int = Field(default=64, ge=2, le=65536)
    clip: float = Field(default=0.96, gt=0, le=1)


class Fp8Stream(Conditioned):
    """Each value rounded to 8-bit floating point (4 exponent and 3 mantissa bits).

    There is one scale per head and block.
    """

    codec: Literal["fp8"] = "fp8"


class D4Stream(Conditioned):
    """Norm, Hadamard rotation, nearest point of the D4 lattice in as many points as `bits` can index."""

    codec: Literal["d4"] = "d4"
    bits: int = Field(ge=1, le=8)
    seed: int = Field(default=3405691582, ge=0)


class E8Stream(Conditioned):
    """Norm, Hadamard rotation, nearest point of the E8 lattice in as many points as `bits` can index."""

    codec: Literal["e8"] = "e8"
    bits: int = Field(ge=1, le=8)
    seed: int = Field(default=3405691582, ge=0)


class KltStream(Frozen):
    """The calibrated transform codec: KLT in the metric of the scores, bits by reverse water-filling.

    `bits` is what a full block of `block_size` tokens may take per value, everything stored included.
    With `escape` a component that falls so far out of its table that storing it apart is the better
    bargain is stored apart.
    """

    codec: Literal["klt"] = "klt"
    bits: float = Field(gt=0, le=8)
    block_size: int = Field(default=512, ge=1, le=65536)
    escape: bool = True


class CastStream(Frozen):
    """Each value rounded to `dtype` and back: what an engine of that dtype does to K and V by itself."""

    codec: Literal["cast"] = "cast"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"


class IsotropicStream(Frozen):
    """A codec's error replaced by white Gaussian noise of the same norm, token by token and head by head.

    What the codec's error costs beyond this is due to its direction, not to its size.
    """

    codec: Literal["isotropic"] = "isotropic"
    of: Annotated[BlockStream | KltStream, Field(discriminator="codec")]
    seed: int = Field(ge=0)


CONTROLS = ("identity", "noise", "cast", "isotropic")
"""What sits in a codec's place without being one."""

AnyStream = (
    IdentityStream
    | BlockStream
    | NoiseStream
    | CastStream
    | IsotropicStream
    | IntStream
    | KiviStream
    | HadamardStream
    | OscarStream
    | Fp8Stream
    | D4Stream
    | E8Stream
    | KltStream
)
StreamRecipe = Annotated[AnyStream, Field(discriminator="codec")]
STREAMS: dict[str, type[Frozen]] = {stream.model_fields["codec"].default: stream for stream in get_args(AnyStream)}
"""The settings of every codec, by its name."""


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
        Whether K is coded before its rotary embedding or behind it.
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

    study: Study
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

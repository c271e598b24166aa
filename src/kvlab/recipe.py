"""What a codec does (`Recipe`) and where it does it (`Cell`), as values with identities.

A recipe is canonical JSON; its sha256 is the `recipe_id` that every result row carries. Two numbers
may be compared only when the ids of everything outside the compared factor are equal.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Engine = Literal["hf", "vllm"]
DType = Literal["float32", "bfloat16"]
Protocol = Literal["in_forward", "snapshot"]
Stream = Literal["k", "v", "kv"]

ID_LENGTH = 12


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
    seed: int = Field(ge=0)
    emulate_published_decoder: bool = False


class NoiseStream(Frozen):
    """Gaussian noise of `sigma` times the tensor's rms, added where a codec would sit."""

    codec: Literal["noise"] = "noise"
    sigma: float = Field(ge=0)
    seed: int = Field(ge=0)


StreamRecipe = Annotated[IdentityStream | BlockStream | NoiseStream, Field(discriminator="codec")]


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


class Cell(Frozen):
    """One measurement: an engine, a dtype and a protocol, a recipe, the coded layers and streams.

    `label` is a readable name inside its study and not part of the identity.
    """

    study: Literal["cells", "layers", "noise"]
    label: str
    engine: Engine
    dtype: DType
    protocol: Protocol
    stream: Stream
    layers: tuple[int, ...]
    windows: int = Field(ge=1)
    recipe: Recipe

    @property
    def recipe_id(self) -> str:
        """Identity of the recipe."""
        return self.recipe.recipe_id

    @property
    def cell_id(self) -> str:
        """Identity of the cell: of everything but its label."""
        return digest(self.model_dump(mode="json", exclude={"label"}))

    def stream_recipe(self, stream: Literal["k", "v"]) -> StreamRecipe:
        """The recipe of one stream; identity when the cell does not code that stream."""
        if stream not in self.stream:
            return IdentityStream()
        return self.recipe.k if stream == "k" else self.recipe.v


IDENTITY = Recipe(k=IdentityStream(), v=IdentityStream())

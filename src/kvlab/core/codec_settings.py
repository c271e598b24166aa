"""What the settings of all codecs share, and what a codec says of itself. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

MOST_BITS = 8
Bits = Annotated[int, Field(ge=1, le=MOST_BITS)]
"""Of a codec with a table for each width; of both streams where one number is given."""


class Frozen(BaseModel):
    """A value: immutable, and closed against unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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

    `center` subtracts the calibrated mean of each head, or with ``bias`` the bias of the model's own projection, which
    no text is needed for; of K after its rotary embedding that is the bias as it is on average over the positions.
    `whiten` (K only) multiplies by the Cholesky
    factor of Sigma_q except on `whiten_skip_layers`; neither stores anything per tensor. `weigh` multiplies K and V
    by the Cholesky factor of what their errors are weighed by (`codecs.shared.metric`: Sigma_q averaged over lags, and
    W_o^T W_o), which is the metric of `klt`. `block_size` is the number of tokens of a stored block.
    """

    center: bool | Literal["bias"] = False
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


class IdentityStream(Frozen):
    """The stream passes through the codec's place unchanged."""

    codec: Literal["identity"] = "identity"


class BlockSettings(Frozen):
    """What K and V of the block codec share, and params.yaml has a section of: PCA, k-means, rotation, Lloyd-Max."""

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


Values = dict[str, Any]
"""Settings by name."""
Tensor = Literal["k", "v"]
Kind = Literal["whitener", "table", "components", "bias", "spectra", "outputs", "own", "whole", "archive"]
"""What may be fitted for a codec: Sigma_q and its Cholesky factor; a Lloyd-Max table; mean, covariance and KLT; the
projection's bias; the spectra of all layers; the second moment of attention's outputs; what the codec fits by itself;
what one of whole caches does; what the archive does."""


@dataclass(frozen=True)
class Published:
    """A codec's settings as its authors published them.

    Parameters
    ----------
    make : callable
        (bits of K, bits of V, further settings of both) -> the fields of a `Recipe`.
    source : str
        Where method and settings are from.
    settings : str
        The settings, for people.
    lacks : str
        What of the publication is not here; empty for nothing.
    in_pipeline : bool
        Whether a parameter of a study may name it. The others read what no file of the pipeline holds; `kvlab measure`
        and `kvlab calibrate` know them.
    fixed : bool
        Whether it has no choice of bits; `make` is given None for both.
    """

    make: Callable[[float | None, float | None, Values], Values]
    source: str
    settings: str
    lacks: str = ""
    in_pipeline: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Plugin:
    """A codec, kvlab's own (``CODEC`` of its folder) or another package's.

    Parameters
    ----------
    settings : type of Frozen
        A closed pydantic model of the codec's settings. `kvlab.Conditioned` has those of a codec that may have mean
        removal and whitening in front of it; a field `bits` makes it one that is measured at several bits.
    codec : str
        Its class as ``package.module:Class``, built as ``Class(settings, calibration)``.
    reads : tuple of {"whitener", "components"}, or callable
        What it reads of a calibration besides what `center` and `whiten` ask for. Of kvlab's own also (settings, "k" or
        "v") -> kinds, where that differs by setting.
    own : callable, optional
        (bits of K, bits of V) -> settings of K and of V that are not the same for both, or hang on the bits.
    published : mapping of str to Published
        Recipes as published, by the name under which they may be asked for.
    scope : {"tensor", "cache"}
        Whether it codes one tensor at a time or all layers of a cache at once.
    as_published : bool
        Whether it is compared at its published settings alone.
    control : bool
        Whether it sits in a codec's place without being one.
    stores : bool
        Whether it writes codes: of one that only changes a tensor no file and no cache can be made.
    """

    settings: type[Frozen]
    codec: str
    reads: tuple[Literal["whitener", "components"], ...] | Callable[[Any, Tensor], tuple[Kind, ...]] = ()
    own: Callable[[float | None, float | None], tuple[Values, Values]] = lambda bits, v_bits: ({}, {})
    published: Mapping[str, Published] = field(default_factory=dict)
    scope: Literal["tensor", "cache"] = "tensor"
    as_published: bool = False
    control: bool = False
    stores: bool = True

"""The studied recipe, as params.yaml describes it, and what of the model it codes."""

from __future__ import annotations

from kvlab.codecs.block import BlockStream
from kvlab.core.codec_settings import BlockSettings
from kvlab.core.params import Params
from kvlab.core.recipe import Recipe


def studied_recipe(params: Params, variance_ratio: float | None = None) -> Recipe:
    """The recipe that params.yaml describes, at another `variance_ratio` if one is given."""
    codec = params.codec
    shared = codec.model_dump(include=set(BlockSettings.model_fields)) | {"codebook": params.calibration.codebooks}
    if variance_ratio is not None:
        shared["variance_ratio"] = variance_ratio
    k = BlockStream(
        bits=params.bits,
        outlier_threshold=codec.outlier_threshold,
        metric=codec.published_decoder or "mse",
        share_basis=codec.share_basis,
        whiten=codec.whiten,
        whiten_skip_layers=codec.whiten_skip_layers if codec.whiten else (),
        emulate_published_decoder=codec.published_decoder is not None,  # the published V kept its scale
        **shared,
    )
    v = BlockStream(
        bits=params.v_bits,
        outlier_threshold=codec.v_outlier_threshold,
        share_basis=codec.v_share_basis,
        whiten=False,
        **shared,
    )
    return Recipe(k=k, v=v)


def coded_layers(params: Params) -> tuple[int, ...]:
    """All layers but the boundary layers."""
    return tuple(i for i in range(params.model.n_layers) if i not in params.codec.boundary_layers)


def variance_ratios(params: Params) -> tuple[float, ...]:
    """Those of the factor, and the studied one."""
    return tuple(dict.fromkeys((*params.gap.variance_ratios, params.codec.variance_ratio)))

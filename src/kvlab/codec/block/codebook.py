"""The Lloyd-Max table that a recipe asks for."""

from __future__ import annotations

from torch import Tensor

from kvlab.base.errors import CalibrationMismatch
from kvlab.base.recipe import BlockStream
from kvlab.codec.base import StreamCalibration
from kvlab.codec.quantizer import gaussian_table


def codebook(recipe: BlockStream, calibration: StreamCalibration | None) -> Tensor:
    """Ascending float32 [2**bits]: the Gaussian table, or the fitted one of the calibration.

    Raises
    ------
    CalibrationMismatch
        When the fitted table is missing, or is not 2**bits ascending finite numbers.
    """
    if recipe.codebook == "gaussian":
        return gaussian_table(recipe.bits).float()
    table = calibration.centroids if calibration else None
    if table is None:
        raise CalibrationMismatch(
            "the recipe asks for a fitted codebook but the calibration holds none; "
            "fit it, or set calibration.codebooks: gaussian"
        )
    table = table.float()
    if table.shape != (2**recipe.bits,):
        raise CalibrationMismatch(
            f"the fitted codebook has shape {list(table.shape)}, {recipe.bits} bits need "
            f"[{2**recipe.bits}]; fit it for this recipe"
        )
    if not (table.diff() >= 0).all() or not table.isfinite().all():
        raise CalibrationMismatch("the fitted codebook is not ascending and finite; fit it again")
    return table

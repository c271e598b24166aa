"""What stands before a codec that reads what it fitted by itself: nothing, but its fit must have the tensor's shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.shared.front import needed
from kvlab.core.errors import CalibrationMismatch


class OwnFront:
    """As `Front`, for a codec whose settings know neither mean removal nor a metric.

    Parameters
    ----------
    codec : str
        Its name.
    calibration : StreamCalibration
        Its `own` holds, by layer, fits with a `shape` (heads, head_dim).
    """

    def __init__(self, codec: str, calibration: StreamCalibration):
        self.codec, self.calibration = codec, calibration

    def of(self, layer: int) -> Any:
        """The fit of a layer; `CalibrationMismatch` when there is none."""
        return needed(self.calibration.own, layer, f"codec: {self.codec}", "fit of its own")

    def fits(self, shape: tuple[int, int, int], layer: int) -> None:
        """`CalibrationMismatch` when there is no fit, or one for another [heads, n, head_dim]."""
        heads, head_dim = self.of(layer).shape
        if (shape[0], shape[2]) != (heads, head_dim):
            raise CalibrationMismatch(
                f"what {self.codec} fitted is for {heads} KV heads of {head_dim} dimensions, the tensor has {shape[0]}"
                f" of {shape[2]}; calibrate this model",
                code="calibration.other-shape",
            )

    def forward(self, x: Tensor, layer: int) -> Tensor:
        """`x` itself."""
        self.fits(tuple(x.shape), layer)
        return x

    def inverse(self, rows: Tensor, layer: int) -> Tensor:
        """`rows` themselves."""
        return rows

"""What may stand before any codec of the ladder: mean removal and a metric of the errors, both calibrated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.shared.whitening import Whitener, fit
from kvlab.core.codec_settings import Conditioned
from kvlab.core.errors import CalibrationMismatch


class Front:
    """Subtracts the calibrated mean and whitens, as the recipe asks, and undoes both.

    Parameters
    ----------
    recipe : Conditioned
        Its `center`, `whiten` and `whiten_skip_layers`.
    calibration : StreamCalibration or None
        Holds the means (in `components`, or `biases`) and the whiteners.
    """

    def __init__(self, recipe: Conditioned, calibration: StreamCalibration | None):
        self.recipe, self.calibration = recipe, calibration or StreamCalibration()
        self._weighers: dict[int, Whitener] = {}

    def forward(self, x: Tensor, layer: int) -> Tensor:
        """[heads, tokens, head_dim] into the codec's domain; `CalibrationMismatch` when something is missing."""
        self.fits(tuple(x.shape), layer)
        mean, whitener = self._mean(layer), self._whitener(layer)
        x = x if mean is None else x - mean.to(x.device)[:, None]
        return whitener.whiten(x) if whitener else x

    def inverse(self, rows: Tensor, layer: int) -> Tensor:
        """Back from the codec's domain."""
        mean, whitener = self._mean(layer), self._whitener(layer)
        rows = whitener.unwhiten(rows) if whitener else rows
        return rows if mean is None else rows + mean.to(rows.device)[:, None]

    def fits(self, shape: tuple[int, int, int], layer: int) -> None:
        """`CalibrationMismatch` when what the recipe asks for is missing, or is for another [heads, n, head_dim]."""
        mean, whitener = self._mean(layer), self._whitener(layer)
        if mean is not None and (shape[0], shape[2]) != tuple(mean.shape):
            raise CalibrationMismatch(
                f"the calibrated mean is for {mean.shape[0]} KV heads of {mean.shape[1]} dimensions, the tensor "
                f"has {shape[0]} of {shape[2]}; calibrate this model",
                code="calibration.other-shape",
            )
        if whitener:
            whitener.fits(shape)

    def _mean(self, layer: int) -> Tensor | None:
        if not self.recipe.center:
            return None
        if self.recipe.center == "bias":
            return needed(self.calibration.biases, layer, "center: bias", "bias")
        return needed(self.calibration.components, layer, "center", "mean").mean

    def _whitener(self, layer: int) -> Whitener | None:
        if self.recipe.weigh:
            return self._weigher(layer)
        if not self.recipe.whiten or layer in self.recipe.whiten_skip_layers:
            return None
        return needed(self.calibration.whiteners, layer, "whiten", "whitener")

    def _weigher(self, layer: int) -> Whitener:
        """The metric that the layer's components were fitted in, as a Cholesky factor."""
        if layer not in self._weighers:
            metric = needed(self.calibration.components, layer, "weigh", "metric").head_metric.cpu()
            self._weighers[layer] = fit(metric, ridge=0.0)
        return self._weighers[layer]


class OwnFront:
    """As `Front`, for a codec that reads what it fitted by itself: nothing stands before it, but the shapes must agree.

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


def needed(found: dict, layer: int, setting: str, what: str):
    """`found[layer]`, or `CalibrationMismatch` that names the recipe's setting that asks for it."""
    if layer not in found:
        raise CalibrationMismatch(
            f"the recipe asks for `{setting}`, and the calibration has no {what} for layer {layer}; calibrate this"
            " model with `kvlab calibrate --model DIR --codec NAME --bits N --out FILE.kv`, and give that file",
            code="calibration.missing",
        )
    return found[layer]

"""What the arms of the study are measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.attention.latent_svd import LatentMoments
from kvlab.calibration.load import Calibrated
from kvlab.core.model import ModelInfo
from kvlab.core.params import Params
from kvlab.engines.hf.engine import HFEngine
from kvlab.measure.windows import Window
from kvlab.witness.plain import PlainModel


@dataclass
class Bench:
    """What arms are measured with.

    Parameters
    ----------
    calibrated : Calibrated
        Of the codecs.
    moments : dict of int to LatentMoments
        That latents are fitted to, of calibration windows.
    """

    params: Params
    info: ModelInfo
    engine: HFEngine
    windows: list[Window]
    context: int
    calibrated: Calibrated
    moments: dict[int, LatentMoments]
    plain: Callable[[], PlainModel] | None

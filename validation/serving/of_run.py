"""What a small cache buys, with the model, the recipes and the calibration that the gate's rows of pages are of."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvlab.base.model import resolve
from kvlab.base.params import Params
from kvlab.base.rungs import ladder_recipe
from kvlab.cache.calibration_file import write_calibration
from kvlab.calibration.load import Fitted, load
from validation.serving.study import study

DEFAULT = ("klt",)  # where `mechanisms.pages` names none


def capacity(params: Params, fitted: Fitted, out: Path) -> None:
    """Write ``CAPACITY.md`` and ``capacity.json`` into `out`; raises as `study.study`.

    Parameters
    ----------
    params : Params
        `mechanisms` says which codecs vLLM's pages hold, at which bits, and in what the engine computes.
    fitted : Fitted
        The pipeline's calibration of this model.

    Raises
    ------
    CalibrationMismatch
        It is another model's, or lacks what a recipe reads.
    """
    info, asked = resolve(params.model), params.mechanisms
    calibrated = load(fitted, info.model_hash)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for codec in asked.pages or DEFAULT:
            for bits in asked.bits:
                recipe = ladder_recipe(codec, bits, "", params)
                files.append(write_calibration(Path(folder) / f"{codec}{bits}.kv", recipe, calibrated, info))
        study(info.path, files, out, asked.dtype)

"""What a small cache buys, alone and under load, with model, recipes and calibration of the gate's rows of pages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvlab.cache.files.calibration import write_calibration
from kvlab.calibration.load import FittedFiles, load
from kvlab.codecs.recipes import named_recipe
from kvlab.core.model import resolve
from kvlab.core.params import Params
from validation.serving.load import study as loads
from validation.serving.study import study

DEFAULT = ("klt",)  # where `mechanisms.pages` names none
PLAIN = (("hadamard", 4),)  # simulated as well: a codec without a calibration


def capacity(params: Params, fitted: FittedFiles, out: Path) -> None:
    """Write ``CAPACITY.md`` and ``capacity.json`` into `out`; raises as `study.study`.

    Parameters
    ----------
    params : Params
        `mechanisms` says which codecs vLLM's pages hold, at which bits, and in what the engine computes.
    fitted : FittedFiles
        The pipeline's calibration of this model.

    Raises
    ------
    CalibrationMismatch
        It is another model's, or lacks what a recipe reads.
    """
    with tempfile.TemporaryDirectory() as folder:
        study(resolve(params.model).path, recipes(params, fitted, Path(folder)), out, params.mechanisms.dtype)


def service(params: Params, fitted: FittedFiles, out: Path) -> None:
    """Write ``LOAD.md``, ``load.json`` and ``steps.json`` into `out`; see `capacity`, and `load.study` for the rest."""
    with tempfile.TemporaryDirectory() as folder:
        loads(resolve(params.model).path, recipes(params, fitted, Path(folder), PLAIN), out)


def recipes(params: Params, fitted: FittedFiles, folder: Path, beside: Iterable[tuple[str, float]] = ()) -> list[Path]:
    """A file for each codec and width that pages may hold, and for those `beside` them, in a folder."""
    info, asked = resolve(params.model), params.mechanisms
    calibrated = load(fitted, info.model_hash)
    wanted = [(codec, bits) for codec in asked.pages or DEFAULT for bits in asked.bits]
    return [
        write_calibration(folder / f"{codec}{bits}.kv", named_recipe(codec, bits, params=params), calibrated, info)
        for codec, bits in dict.fromkeys([*wanted, *beside])
    ]

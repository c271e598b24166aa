"""One process: jobs of any studies that share engines and windows, in a single walk over the windows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvlab.calibration.load import FittedFiles
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import MissingResult, UnknownName
from kvlab.core.params import Params
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.jobs.measure import CellsPart, JobPart, Lab, run
from kvlab_pipeline.studies.baseline.measure import BaselinePart
from kvlab_pipeline.studies.mechanisms.measure import MechanismsPart, longest
from kvlab_pipeline.studies.processes import BASELINE, MECHANISMS


def measure_jobs(
    params: Params,
    jobs: Sequence[str],
    windows_path: Path,
    fitted: dict[str, FittedFiles],
    results: Path,
    *,
    choice: Frozen | None = None,
    needles_path: Path | None = None,
    code: str | None = None,
    folder: Path | None = None,
) -> list[Path]:
    """Measure jobs together and write their files, ``<results>/<study>/<model>/<job>.parquet`` and ``.json``.

    Parameters
    ----------
    jobs : sequence of str
        ``<study>/<job>`` of each, as in `units.units`.
    fitted : dict of str to FittedFiles
        The calibrations by origin, with the codebooks of all studies; empty where no codec needs one.
    choice : mitigations.plan.LayerChoice, optional
        What the mitigations are planned from.
    needles_path : Path, optional
        What `kvlab step needles` wrote, and `code`, the digest of what measures: needed by the mechanisms.
    folder : Path, optional
        The store of what was measured before, see `Lab.open`.

    Returns
    -------
    list of Path
        The tables that were written.

    Raises
    ------
    UnknownName
        There is no such study, or no such job in it under these parameters.
    MissingResult
        The mechanisms are measured, and no needles or no digest of the code is named.
    CodecNotActive, NonFinite
        See `jobs.measure.run`.
    """
    places = sorted((tuple(job.partition("/")[::2]) for job in jobs), key=lambda place: place[0] != BASELINE)
    mechanisms = MECHANISMS in {study for study, _ in places}
    if mechanisms and (needles_path is None or code is None):
        raise MissingResult(
            "the mechanisms need --needles (of `kvlab step needles`) and --code, a digest of what measures"
        )
    with Lab.open(params, windows_path, fitted, folder, longest(params, needles_path) if mechanisms else 0) as lab:
        outs = {place: results / place[0] / params.model.slug / f"{place[1]}.parquet" for place in places}
        run(lab, [part_of(lab, *place, outs[place], choice, needles_path, code) for place in places], "jobs")
    return list(outs.values())


def part_of(
    lab: Lab, study: str, job: str, out: Path, choice: Frozen | None, needles_path: Path | None, code: str | None
) -> JobPart:
    """What one job of a study contributes."""
    if study == BASELINE:
        return BaselinePart(lab, job, out)
    if study == MECHANISMS:
        if job not in lab.params.engines:
            raise UnknownName("engine of these parameters", job, lab.params.engines)
        return MechanismsPart(lab, job, needles_path, code, out)
    return CellsPart(lab, study, plan.job_cells(lab.params, study, job, choice), out)

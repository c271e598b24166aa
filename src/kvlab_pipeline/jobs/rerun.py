"""Results that are asked again: one window of one cell of each family, measured anew and computed by the witness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from kvlab.calibration.load import FittedFiles
from kvlab.core.errors import MixedIdentity, UserError
from kvlab.core.params import Params
from kvlab.core.records import JobRecord, read_job
from kvlab.core.testimony import Testimony
from kvlab.measure.windows import windows_for
from kvlab.measure.witnessing import witnessed_of
from kvlab_pipeline.jobs.measure import Lab


def witness(params: Params, result: Path, windows_path: Path, fitted: dict[str, FittedFiles]) -> Iterator[Testimony]:
    """Testimonies of one result, each as soon as there is one.

    Parameters
    ----------
    result : Path
        The ``.json`` or ``.parquet`` of a job of cells, as `kvlab step measure` writes it.
    fitted : dict of str to FittedFiles
        The calibrations by origin; empty where no codec needs one.

    Raises
    ------
    MixedIdentity
        The result is of another model, other windows or another calibration than are given.
    WitnessDisagrees
        The rows of the result are not those of the cell today, or a plain forward comes to something else.
    UserError
        The result holds no codec's cell.
    """
    record, tokens = read_job(result)
    with Lab.open(params, windows_path, fitted) as lab:
        refuse_another(record, lab)
        subjects = [lab.subject(one.cell) for one in record.cells]
        windows = windows_for([one.cell for one in record.cells], lab.windows)
        asked = lab.witnesses(subjects, windows)
        if not asked:
            raise UserError(f"{result} holds no cell with a codec; there is nothing that a witness could see")
        visit = None
        for one in asked:
            visit = visit if visit and visit.window == one.on else lab.visit(one.on)
            found = one.score(visit)
            own = pl.col("cell_id") == one.cell.cell_id
            rows = tokens.filter(own, pl.col("window") == one.on.number).sort("position")
            yield witnessed_of(found, one.cell, rows)


def refuse_another(record: JobRecord, lab: Lab) -> None:
    """`MixedIdentity` unless a result is of this model, these windows and these calibrations."""
    theirs, ours = record.provenance, lab.provenance(record.provenance.calibration)
    fields = ("model_hash", "corpus_hash", "calibration")
    differing = {name: [str(getattr(theirs, name)), str(getattr(ours, name))] for name in fields}
    differing = {name: values for name, values in differing.items() if values[0] != values[1]}
    if differing:
        raise MixedIdentity(differing)

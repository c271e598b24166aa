"""Results of the layer and noise studies held in memory, with planted mean KL in every cell and run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell, digest
from kvlab.core.records import BaselineCell, BaselineRecord, CellRecord, Coding, Provenance
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.jobs.plan import baseline_runs, study_cells
from kvlab_pipeline.studies.measured import Measured, Results
from pipeline.report.planted_identity import provenance
from pipeline.report.shipped import shipped

BOOT = Bootstrap(400, 0.95, 0)
WINDOWS, TOKENS, CONTEXT = 12, 16, 64
FLOOR = 1e-6  # KL of an identity cell
SMALL = {
    "windows": {"context": CONTEXT, "eval": TOKENS + 1, "test": WINDOWS + 4},
    "layers": {"windows": WINDOWS},
    "noise": {"windows": WINDOWS},
    "mitigations": {"windows": WINDOWS},
    "ladder": {"windows": WINDOWS},
}


def planted_params(**changes) -> Params:
    """The embedded model's parameters, shrunk, with `changes` (nested dicts) laid over it."""
    return shipped(SMALL, changes)


def planted_results(
    params: Params,
    study: str,
    kl: Callable[[Cell], float],
    scatter: float = 0.05,
    run_kl: Callable[[str], float] | None = None,
) -> Results:
    """One study on every engine.

    Parameters
    ----------
    kl : callable
        Mean KL of a cell beyond its floor; identity cells are not asked.
    scatter : float
        Of each token of each cell, log-normal, beyond the windows' own, which all cells share.
    run_kl : callable, optional
        Mean KL of a baseline run, over the windows of the study; its further windows hold ten times that.
    """
    origin = provenance(calibration={})
    cells = [cell for engine in params.engines for cell in study_cells(params, study, engine)]
    measured = tuple(
        Measured(
            record(cell),
            origin,
            CONTEXT,
            TOKENS + 1,
            rows(cell.cell_id, FLOOR + (kl(cell) if cell.recipe != IDENTITY else 0.0), scatter),
        )
        for cell in cells
    )
    runs, tables = {}, {}
    for run, what in baseline_runs(params).items() if run_kl else ():
        further = rows(run, 10 * run_kl(run), scatter).with_columns(pl.col("window") + WINDOWS)
        tables[run, "plain", None] = pl.concat([rows(run, run_kl(run), scatter), further])
        runs[run] = run_record(run, *what, origin)
    return Results(measured, runs, tables, origin)


def rows(name: str, mean: float, scatter: float) -> pl.DataFrame:
    """Token rows whose mean KL is exactly `mean`."""
    shared = np.random.default_rng(0).lognormal(0, 0.3, (WINDOWS, 1))
    own = np.random.default_rng(int(digest({"name": name})[:8], 16)).lognormal(0, scatter, (WINDOWS, TOKENS))
    kl = shared * own
    window, position = np.meshgrid(np.arange(WINDOWS), CONTEXT + 1 + np.arange(TOKENS), indexing="ij")
    return pl.DataFrame({"window": window.ravel(), "position": position.ravel(), "kl": (kl * mean / kl.mean()).ravel()})


def record(cell: Cell) -> CellRecord:
    """What a job leaves beside its rows; the amounts do not matter here."""
    coding = Coding(
        fires=1,
        expected_fires=1,
        values=1000,
        coded_bytes=450,
        raw_bytes=0,
        d_eff={},
        outlier_rate={},
        whitened_error={},
    )
    return CellRecord(cell_id=cell.cell_id, recipe_id=cell.recipe_id, cell=cell, coding=coding, canary_kl=None)


def run_record(name: str, engine: str, dtype: str, attention: str, origin: Provenance) -> BaselineRecord:
    """What a baseline run leaves beside its rows: the comparison with the truth."""
    return BaselineRecord(
        provenance=origin,
        run=name,
        engine=engine,
        dtype=dtype,
        attention=attention,
        context=CONTEXT,
        eval=TOKENS + 1,
        cells=(BaselineCell.of(name, engine, dtype, attention, "plain", None),),
    )


def plain_basis(estimates: list[dict]) -> str:
    """A line under a table that only counts."""
    return f"{len([given for given in estimates if given])} estimates"

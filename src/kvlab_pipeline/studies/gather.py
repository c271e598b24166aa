"""Read every result file, and refuse what cannot be trusted before any number is made of it.

What comes out of `gather` is whole (each planned cell once), of one identity, finite, on the same
scored tokens, and from codecs that fired. `comparable` is the second door: every difference between
cells goes through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl

from kvlab.calibration.needs import pieces
from kvlab.core.errors import MissingResult, MixedIdentity, StaleResult
from kvlab.core.params import Params
from kvlab.core.records import (
    BaselineRecord,
    JobRecord,
    read_baseline,
    read_job,
)
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies.baseline.truth import peer_of, trial_windows
from kvlab_pipeline.studies.checks import (
    ANY_JOB,
    ONE_JOB,
    by_cell,
    describe,
    on_grid,
    refuse_high_floor,
    refuse_inactive,
    refuse_mixed,
    refuse_one_engine,
    refuse_other_labels,
    refuse_other_references,
    refuse_several,
    refuse_stale,
    refuse_stale_comparison,
    refuse_unwitnessed,
    refuse_wrong_bytes,
)
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.mitigations.plan import LayerChoice


def gather(
    params: Params, baseline_paths: Sequence[Path], job_paths: Sequence[Path], choice: LayerChoice | None = None
) -> Results:
    """Read all jobs and baseline runs, or refuse them; `choice` is what the mitigations were planned from.

    Raises
    ------
    MissingResult
        A planned cell or run is not there; names it and the command that makes it.
    StaleResult
        A cell is not planned by these parameters, is there twice, or its id is not that of its content.
    MixedIdentity
        Files differ in model, corpus, calibration, versions, device or window sizes, or cells were
        scored on other windows, positions or labels; names the fields.
    NonFinite
        A row holds NaN or infinity.
    CodecNotActive
        A codec did not fire as often as it should, or its canary did not move the logits.
    """
    return whole(params, read_cells(params, job_paths, choice), *read_baselines(params, baseline_paths))


def whole(
    params: Params,
    cells: Sequence[Measured],
    runs: dict[str, BaselineRecord],
    run_tokens: dict[tuple[str, str, str | None], pl.DataFrame],
) -> Results:
    """What was read, if it is of one identity, on the same labels and of codecs that fired; raises as `gather`."""
    refuse_mixed([*cells, *runs.values()], params)
    refuse_several({"model": {params.model.slug, cells[0].provenance.model}})
    for measured in cells:
        refuse_inactive(measured)
        refuse_high_floor(measured)
    refuse_wrong_bytes(cells)
    refuse_other_references(cells, ANY_JOB)
    refuse_other_labels([one.tokens for one in cells if one.cell.text == "test"] + list(run_tokens.values()))
    if others := [one.tokens for one in cells if one.cell.text == "other"]:
        refuse_other_labels(others)
    provenances = [found.provenance for found in (*cells, *runs.values())]
    calibration = {origin: sigma for found in provenances for origin, sigma in sorted(found.calibration.items())}
    provenance = provenances[0].model_copy(update={"calibration": dict(sorted(calibration.items()))})
    return Results(tuple(cells), runs, run_tokens, provenance)


def read_cells(params: Params, paths: Sequence[Path], choice: LayerChoice | None = None) -> list[Measured]:
    """Every planned cell exactly once, in the plan's order."""
    planned = {
        cell.cell_id: (study, job, cell)
        for study in plan.studies(params)
        for job, cells in plan.jobs(params, study, choice).items()
        for cell in cells
    }
    found: dict[str, Measured] = {}
    read: list[JobRecord] = []
    for path in paths:
        job, tokens = read_job(path)
        read.append(job)
        tables = by_cell(tokens, [record.cell_id for record in job.cells], path)
        for record in job.cells:
            refuse_stale(record, planned, path)
            if record.cell_id in found:
                raise StaleResult(
                    f"{describe(record.cell)} is there twice, the second time in {path}; remove one", code="stale.twice"
                )
            rows = on_grid(tables[record.cell_id], record.cell.windows, job.context, job.eval, describe(record.cell))
            documents = job.documents.get(record.cell.text)
            found[record.cell_id] = Measured(record, job.provenance, job.context, job.eval, rows, documents)
        refuse_other_references([found[record.cell_id] for record in job.cells], ONE_JOB)
        refuse_unwitnessed(job, tables, path)
    refuse_one_engine(read)
    for cell_id, (study, job, cell) in planned.items():
        if cell_id not in found:
            raise MissingResult(
                f"{describe(cell)} is missing; run `kvlab step measure --study {study} --job {job}`",
                code="missing-result.cell",
            )
        refuse_unnamed_calibration(found[cell_id], study, job)
    refuse_other_calibration(found.values(), {cell_id: f"{place[0]}/{place[1]}" for cell_id, place in planned.items()})
    return [found[cell_id] for cell_id in planned]


def refuse_unnamed_calibration(measured: Measured, study: str, job: str) -> None:
    """`StaleResult` unless a record says what was given for everything fitted that its codecs read."""
    expected, named = set(pieces(measured.cell)), set(measured.record.fitted)
    if expected != named:
        raise StaleResult(
            f"{describe(measured.cell)}: its record and its recipe do not name the same fitted material"
            f" ({sorted(expected ^ named)[0]}); run `kvlab step measure --study {study} --job {job}` again",
            code="stale.other-calibration",
        )


def refuse_other_calibration(cells: Iterable[Measured], jobs: dict[str, str] | None = None) -> None:
    """Cells that read the same piece of one origin's calibration must have been given the same numbers.

    The id of a cell does not change with what a table was fitted on, for example with the layers that
    ``codec.boundary_layers`` leaves out.

    Parameters
    ----------
    cells : iterable of Measured
        Of any studies.
    jobs : dict of str to str, optional
        Where each cell was measured, by its id.

    Raises
    ------
    MixedIdentity
        Names the piece and two cells that differ in it.
    """
    first: dict[tuple[str, str], Measured] = {}
    for measured in cells:
        for piece, made in measured.record.fitted.items():
            other = first.setdefault((measured.cell.origin, piece), measured)
            if other.record.fitted[piece] != made:
                shown = [
                    f"{one.record.fitted[piece]}: {describe(one.cell)}"
                    + (f" of job {jobs[one.cell.cell_id]}" if jobs else "")
                    for one in (other, measured)
                ]
                raise MixedIdentity({f"calibration on {measured.cell.origin}, {piece}": shown})


def read_baselines(
    params: Params, paths: Sequence[Path]
) -> tuple[dict[str, BaselineRecord], dict[tuple[str, str, str | None], pl.DataFrame]]:
    """Every planned baseline run exactly once, and its token rows by (run, what, protocol)."""
    planned = plan.baseline_runs(params)
    found, tables = {}, {}
    for path in paths:
        record, tokens = read_baseline(path)
        if planned.get(record.run) != (record.engine, record.dtype, record.attention) or record.run in found:
            raise StaleResult(f"{path}: baseline run {record.run!r} is not planned by these parameters, or there twice")
        rows = by_cell(tokens, [cell.cell_id for cell in record.cells], path)
        found[record.run] = record
        for cell in record.cells:
            name = f"baseline {record.run} {cell.what} {cell.protocol or ''}".strip()
            refuse_stale_comparison(record, cell, peer_of(planned, record.run), path)
            many = trial_windows(params) if cell.protocol else params.baseline.windows
            grid = on_grid(rows[cell.cell_id], many, record.context, record.eval, name)
            tables[record.run, cell.what, cell.protocol] = grid
    for run in planned:
        if run not in found:
            raise MissingResult(
                f"baseline run {run!r} is missing; run `kvlab step baseline --run {run}`", code="missing-result.run"
            )
    return {run: found[run] for run in planned}, tables


def comparable(rows: Iterable[Measured], compared: Iterable[str]) -> None:
    """Refuse cells that differ outside the compared factors.

    Parameters
    ----------
    rows : iterable of Measured
        The cells about to be compared.
    compared : iterable of str
        Names of fields of a cell: ``engine``, ``protocol``, ``dtype``, ``stream``, ``layers``, ``origin``,
        ``windows``, ``recipe`` (all of it), or one field of a recipe, such as ``variance_ratio``.

    Raises
    ------
    MixedIdentity
        Names every differing field and its values, or a piece of calibration that was not the same.
    """
    factors, rows = set(compared), list(rows)
    refuse_other_calibration(rows)
    found = [measured.fields() for measured in rows]
    values: dict[str, set[str]] = {}
    for name in sorted({name for fields in found for name in fields}):
        if not factors & {name, name.split(".")[0], name.split(".")[-1]}:
            # A job that reads no calibration has none to differ in.
            kept = [f.get(name) for f in found if name != "origin.calibration" or f[name] is not None]
            values[name] = set(map(str, kept))
    refuse_several(values)

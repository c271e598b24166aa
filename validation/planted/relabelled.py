"""Negative control: the same result files with two labels exchanged. The case has to fail, or it could not fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from kvlab.core.errors import StaleResult
from kvlab.core.recipe import IDENTITY, Cell
from kvlab.core.records import CellRecord, JobRecord, read_job, write_job
from kvlab.core.testimony import Testimony
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.studies.factors.numbers import gap_levels
from validation.planted.claims import Claim, contains, together
from validation.planted.factorial import FURTHEST, Files, claims, read_files

SWAPPED = ("engine", "dtype", "protocol")  # labels that no codec and no calibration contradicts


def controls(files: Files, boot: Bootstrap, among: Sequence[Claim]) -> list[dict]:
    """What becomes of each exchange, where the factor has two levels.

    Parameters
    ----------
    files : Files
    boot : Bootstrap
    among : sequence of Claim
        All claims of the study: a control is held to intervals as wide as theirs.

    Returns
    -------
    list of dict
        ``factor``, ``levels``, ``refused`` (with the ids as they were the reader refuses the files), ``values``,
        ``missed`` (of those, with the ids made anew), ``plain`` (of those, outside their plain intervals), ``row``
        (relative: how far the row that is furthest off is off), ``holds`` (the reader refused, and the case fails).
    """
    found = []
    for factor in SWAPPED:
        levels = gap_levels(files.params)[factor]
        if len(levels) == 2:
            folder = files.paths[0].parent.parent / f"swapped-{factor}"
            again = claims(
                files.params,
                files.planted,
                read_files(files.params, exchanged(files.paths, factor, levels, folder / "anew")),
            )
            refused = is_refused(files, exchanged(files.paths, factor, levels, folder / "kept", new_ids=False))
            outcome = judged(again, boot, together(boot, among))
            outcome["holds"] &= refused
            found.append({"factor": factor, "levels": levels, "refused": refused} | outcome)
    return found


def judged(again: Sequence[Claim], boot: Bootstrap, joint: Bootstrap) -> dict:
    """What of the case's values is missed; it fails where one is, be it by chance's intervals or by a row."""
    estimates = [(claim, claim.estimate(joint)) for claim in again]
    held = [contains(estimate, claim.planted) for claim, estimate in estimates]
    by_chance = [claim for claim in again if claim.chance]
    return {
        "values": len(by_chance),
        "missed": sum(not inside for (claim, _), inside in zip(estimates, held, strict=True) if claim.chance),
        "plain": sum(not contains(claim.estimate(boot), claim.planted) for claim in by_chance),
        "row": next(estimate.value for claim, estimate in estimates if claim.name.endswith(FURTHEST)),
        "holds": not all(held),
    }


def is_refused(files: Files, paths: Sequence[Path]) -> bool:
    """Whether the reader refuses files as stale."""
    try:
        read_files(files.params, paths)
    except StaleResult:
        return True
    return False


def exchanged(
    paths: Sequence[Path], factor: str, levels: Sequence[str], folder: Path, new_ids: bool = True
) -> list[Path]:
    """The jobs' files with two labels exchanged in every corner; with `new_ids` all that they say fits."""
    jobs = {path: read_job(path) for path in paths}
    proofs = {one.cell.engine: seen.engine for record, _ in jobs.values() for one, seen in witnessed(record)}
    written = []
    for path, (record, tokens) in jobs.items():
        ids, cells = {}, []
        for one in record.cells:
            cell = relabelled(one.cell, factor, levels)
            ids[one.cell_id] = cell.cell_id if new_ids else one.cell_id
            cells.append(one.model_copy(update={"cell": cell, "cell_id": ids[one.cell_id]}))
        seen = [
            one.model_copy(
                update={"cell_id": ids[one.cell_id], "engine": proofs[relabelled(of.cell, factor, levels).engine]}
            )
            for of, one in witnessed(record)
        ]
        table = tokens.with_columns(pl.col("cell_id").replace_strict(ids, return_dtype=pl.String))
        written.append(folder / path.name)
        write_job(written[-1], record.model_copy(update={"cells": tuple(cells), "witnessed": tuple(seen)}), table)
    return written


def witnessed(record: JobRecord) -> list[tuple[CellRecord, Testimony]]:
    """Each testimony of a job with the cell that it is of."""
    return [(one, seen) for seen in record.witnessed for one in record.cells if one.cell_id == seen.cell_id]


def relabelled(cell: Cell, factor: str, levels: Sequence[str]) -> Cell:
    """A cell under the factor's other level; a floor keeps its protocol, as a rerun has but one."""
    if factor == "protocol" and cell.recipe == IDENTITY:
        return cell
    low, high = levels
    return cell.model_copy(update={factor: {low: high, high: low}[getattr(cell, factor)]})

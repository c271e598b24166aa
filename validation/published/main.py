"""``kvlab published``: read the published result files, reproduce them, and say what they carry."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import polars as pl

from kvlab.core.records import atomic, write_table, write_text
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.report.schema import load
from validation.published.families import READ, read_folder, refuse_foreign
from validation.published.reanalyse import Figures
from validation.published.report import Study, render
from validation.published.rows import table

BOUNDS = ("value", "low", "high", "method")


def published(folder: Path, out: Path, metrics: Path | None = None) -> dict:
    """Read a folder of published JSON files and write the report.

    Writes ``REPORT.md``, ``rows.parquet`` (`rows.WINDOWS`), ``cells.csv``, ``differences.csv`` and ``checks.csv``.

    Parameters
    ----------
    folder : Path
        Searched with all its subfolders; files are named relative to it.
    out : Path
    metrics : Path or None
        This project's ``metrics.json``, printed beside the published numbers.

    Returns
    -------
    dict
        ``files`` read, ``checked`` numbers, and how many ``agree``.

    Raises
    ------
    UserError
        When the folder is missing, or no file in it is one of the study.
    StorageError
        When a JSON file is damaged, or the output cannot be written.
    MissingResult, StaleResult
        When the metrics are none of this version, hold NaN or infinity, or were changed.
    """
    given = None if metrics is None else load(metrics)
    sources = read_folder(Path(folder), without=Path(out))
    refuse_foreign(Path(folder), sources)
    study = Study.of(sources)
    text = render(study, given)  # before any file is written: a report that cannot be made leaves the old one whole
    out = Path(out)
    write_table(out / "rows.parquet", table(study.cells))
    write_csv(out / "cells.csv", [flat(row) for row in study.figures])
    write_csv(out / "differences.csv", [flat_difference(row) for row in study.differences])
    write_csv(out / "checks.csv", [texts(check.model_dump()) for check in study.checks])
    write_text(out / "REPORT.md", text)
    return {
        "files": sum(source.status == READ for source in study.sources),
        "checked": len(study.checks),
        "agree": sum(check.agrees for check in study.checks),
    }


def write_csv(path: Path, rows: list[dict]) -> None:
    """Rows as CSV, atomically; no rows make an empty file."""
    with atomic(path) as temporary:
        pl.DataFrame(rows, infer_schema_length=None).write_csv(temporary) if rows else temporary.write_text("")


def flat(row: Figures) -> dict:
    """A cell's facts and estimates in one row; an estimate takes one column per bound."""
    facts = {f"recipe_{name}": text(given) for name, given in row.cell.facts.model_dump().items()}
    found = {"file": row.cell.file, "cell": row.cell.name, "role": row.cell.role}
    for one in fields(row):
        given = getattr(row, one.name)
        if one.name == "cell":
            continue
        if "Estimate" in str(one.type):
            found |= bounds(one.name, given)
        else:
            found[one.name] = given
    return found | {"stored_verdict": row.cell.stored_verdict} | facts


def flat_difference(row) -> dict:
    """A difference in one row."""
    found = {"file": row.b.file, "cell": row.b.name, "minus_file": row.a.file, "minus_cell": row.a.name}
    for name in ("change", "delta_nll", "top1"):
        found |= bounds(name, getattr(row, name))
    return found | {"n_windows": row.change.n_windows, "same_text": row.same_text, "crosses": " ".join(row.crosses)}


def bounds(name: str, given: Estimate | None) -> dict:
    """An estimate as columns."""
    return {f"{name}_{part}": None if given is None else getattr(given, part) for part in BOUNDS}


def text(given: object) -> str | None:
    """A recipe value as text; None stays empty, which is "not recorded"."""
    if isinstance(given, tuple):
        return " ".join(map(str, given))
    return None if given is None else str(given)


def texts(row: dict) -> dict:
    """A check with both numbers as text, to their last digit."""
    return row | {name: repr(row[name]) if not isinstance(row[name], str) else row[name] for name in ("stored", "ours")}

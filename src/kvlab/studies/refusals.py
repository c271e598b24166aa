"""What one result file, or a few beside one another, are refused for before any number is made of them.

`kvlab.studies.gather` asks all of it of everything that a report is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from kvlab.base.errors import CodecNotActive, Fault, MixedIdentity, StaleResult
from kvlab.base.params import Params
from kvlab.base.recipe import Cell
from kvlab.base.records import CANARY_MIN, BaselineCell, BaselineRecord, CellRecord
from kvlab.studies.measured import Measured


def describe(cell: Cell) -> str:
    """A cell in words."""
    return f"cell {cell.label!r} ({cell.study}, {cell.engine}, {cell.dtype}, {cell.protocol}, id {cell.cell_id})"


def refuse_stale(record: CellRecord, planned: dict, path: Path) -> None:
    """A record must be about the cell that it carries, and the plan must know that cell."""
    for name in ("cell_id", "recipe_id"):
        written, content = getattr(record, name), getattr(record.cell, name)
        if written != content:
            raise StaleResult(f"{path}: {name} {written} is not that of its content, {content}; measure it again")
    if record.cell_id not in planned:
        raise StaleResult(
            f"{path}: {describe(record.cell)} is not planned by these parameters; "
            "it was measured under others, measure the job again"
        )


def by_cell(tokens: pl.DataFrame, cell_ids: list[str], path: Path) -> dict[str, pl.DataFrame]:
    """Token rows by cell; the table and the record must name the same cells."""
    tables = {key[0]: rows for key, rows in tokens.partition_by("cell_id", as_dict=True).items()}
    if len(set(cell_ids)) != len(cell_ids) or set(tables) != set(cell_ids):
        raise StaleResult(
            f"{path}: the record names cells {sorted(cell_ids)} and the table {sorted(tables)}; measure the job again"
        )
    return tables


def on_grid(rows: pl.DataFrame, windows: int, context: int, n_eval: int, name: str) -> pl.DataFrame:
    """The rows sorted; refused unless they are windows 0..n-1 times the scored positions, each once.

    Raises
    ------
    MixedIdentity
        Names the windows and positions found and those expected.
    Fault
        When a KL is negative, which no distributions can give.
    """
    rows = rows.sort("window", "position")
    positions = np.arange(context + 1, context + n_eval)
    window = np.repeat(np.arange(windows), positions.size)
    position = np.tile(positions, windows)
    found = [rows["window"].to_numpy(), rows["position"].to_numpy()]
    if not (np.array_equal(found[0], window) and np.array_equal(found[1], position)):
        fields = {}
        for title, got, due in zip(("windows", "positions"), found, (window, position), strict=True):
            fields[title] = [f"{name}: {_span(got)}", f"expected: {_span(due)}"]
        raise MixedIdentity(fields)
    if (rows["kl"] < 0).any():
        raise Fault(f"{name} has a negative KL ({rows['kl'].min()}); its log-probabilities are not normalised")
    return rows


def _span(numbers: np.ndarray) -> str:
    distinct = np.unique(numbers)
    return f"{distinct[0]}..{distinct[-1]}, {distinct.size} of them, {numbers.size} rows"


def refuse_stale_comparison(record: BaselineRecord, cell: BaselineCell, peer: str | None, path: Path) -> None:
    """A baseline comparison is with what the plan says, and its id is the digest of what it says it is.

    Parameters
    ----------
    peer : str or None
        The run that a ``peer`` comparison is planned with, if one is; everything else is with the truth.
    """
    reference = peer if cell.what == "peer" else "truth"
    if cell.reference != reference:
        raise StaleResult(
            f"{path}: {cell.what!r} of run {record.run!r} is against {cell.reference!r}, and these parameters plan"
            f" {repr(reference) if reference else 'no such comparison'}; measure it again"
        )
    made = (record.run, record.engine, record.dtype, record.attention)
    expected = BaselineCell.of(*made, cell.what, cell.protocol, reference)
    if cell != expected:
        raise StaleResult(
            f"{path}: cell_id {cell.cell_id} is not that of its content, {expected.cell_id}; measure it again"
        )


def refuse_mixed(found: Sequence[Measured | BaselineRecord], params: Params) -> None:
    """One model, corpus, calibration, set of versions, device and window size, which is the params'."""
    values: dict[str, set[str]] = {"context": {str(params.windows.context)}, "eval": {str(params.windows.eval)}}
    for one in found:
        for name, value in (one.provenance.model_dump() | {"context": one.context, "eval": one.eval}).items():
            shown = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
            for key, single in shown.items():
                values.setdefault(key, set()).add(str(single))
    refuse_several(values)
    packages = {frozenset(one.provenance.versions) for one in found}
    if len(packages) > 1:
        raise MixedIdentity({"versions": [", ".join(sorted(names)) for names in packages]})


def refuse_several(values: dict[str, set[str]]) -> None:
    """`MixedIdentity` that names every field of more than one value."""
    several = {name: found for name, found in values.items() if len(found) > 1}
    if several:
        raise MixedIdentity(several)


def refuse_inactive(measured: Measured) -> None:
    """`CodecNotActive` unless the codec fired as planned and its canary moved the logits."""
    coding, canary = measured.record.coding, measured.record.canary_kl
    idle = measured.role not in ("rerun", "identity") and coding.expected_fires == 0
    if coding.fires != coding.expected_fires or idle:
        raise CodecNotActive(
            f"{describe(measured.cell)}: the codec fired {coding.fires} times, expected {coding.expected_fires}"
            + (", but a codec has to fire" if idle else "")
        )
    if canary is not None and not canary >= CANARY_MIN:
        raise CodecNotActive(
            f"{describe(measured.cell)}: a one-bit codec moved the logits by KL {canary:.2g} only;"
            f" at least {CANARY_MIN:g} is expected"
        )


def refuse_other_labels(tables: Sequence[pl.DataFrame]) -> None:
    """All tables must score the same label at each position; a shorter table is a prefix of the longest."""
    longest = max(tables, key=len)["label"].to_numpy()
    for table in tables:
        labels = table["label"].to_numpy()
        if not np.array_equal(labels, longest[: labels.size]):
            first = int(np.flatnonzero(labels != longest[: labels.size])[0])
            place = f"window {table['window'][first]} position {table['position'][first]}"
            raise MixedIdentity({f"label at {place}": [int(labels[first]), int(longest[first])]})

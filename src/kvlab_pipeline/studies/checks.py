"""What one result file, or a few beside one another, are refused for before any number is made of them.

`kvlab_pipeline.studies.gather` asks all of it of everything that a report is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from kvlab.core.errors import CodecNotActive, EnginesDisagree, Fault, MixedIdentity, StaleResult, WitnessDisagrees
from kvlab.core.params import Params
from kvlab.core.recipe import ENGINES, Cell
from kvlab.core.records import CANARY_MIN, SAME, BaselineCell, BaselineRecord, CellRecord, JobRecord
from kvlab.core.testimony import Proof
from kvlab_pipeline.studies.measured import Measured

MOST_STORED = 64  # bits a value: twice float32, for codes with tables in very short windows
WITNESSED = 1e-6  # relative, between a mean that was seen and the same mean of a table
ONE_JOB = {"float32": 0.0, "bfloat16": 0.0}
"""Nats between the clean passes that cells of one job were held against: there is one."""
ANY_JOB = {"float32": 1e-3, "bfloat16": 0.5}
"""The same between jobs, whose processes may add up in another order."""


def describe(cell: Cell) -> str:
    """A cell in words."""
    return f"cell {cell.label!r} ({cell.study}, {cell.engine}, {cell.dtype}, {cell.protocol}, id {cell.cell_id})"


def refuse_stale(record: CellRecord, planned: dict, path: Path) -> None:
    """A record must be about the cell that it carries, and the plan must know that cell."""
    for name in ("cell_id", "recipe_id"):
        written, content = getattr(record, name), getattr(record.cell, name)
        if written != content:
            raise StaleResult(
                f"{path}: {name} {written} is not that of its content, {content}; measure it again",
                code="stale.forged-id",
            )
    if record.cell_id not in planned:
        raise StaleResult(
            f"{path}: {describe(record.cell)} is not planned by these parameters; "
            "it was measured under others, measure the job again",
            code="stale.not-planned",
        )


def by_cell(tokens: pl.DataFrame, cell_ids: list[str], path: Path) -> dict[str, pl.DataFrame]:
    """Token rows by cell; the table and the record must name the same cells."""
    tables = {key[0]: rows for key, rows in tokens.partition_by("cell_id", as_dict=True).items()}
    if len(set(cell_ids)) != len(cell_ids) or set(tables) != set(cell_ids):
        raise StaleResult(
            f"{path}: the record names cells {sorted(cell_ids)} and the table {sorted(tables)}; measure the job again",
            code="stale.other-cells",
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
    positions = np.arange(context + 1, context + n_eval)
    expected = np.repeat(np.arange(windows), positions.size), np.tile(positions, windows)
    found = _places(rows)
    if not all(map(np.array_equal, found, expected)):  # they are written in order, and to sort them takes longer
        rows = rows.sort("window", "position")
        found = _places(rows)
    if not all(map(np.array_equal, found, expected)):
        fields = {}
        for title, got, wanted in zip(("windows", "positions"), found, expected, strict=True):
            fields[title] = [f"{name}: {_span(got)}", f"expected: {_span(wanted)}"]
        raise MixedIdentity(fields)
    if (rows["kl"] < 0).any():
        raise Fault(
            f"{name} has a negative KL ({rows['kl'].min()}); its log-probabilities are not normalised",
            code="fault.negative-kl",
        )
    return rows


def _places(rows: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Window and position of each row."""
    return rows["window"].to_numpy(), rows["position"].to_numpy()


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
            f" {repr(reference) if reference else 'no such comparison'}; measure it again",
            code="stale.other-reference" if reference else "stale.no-reference",
        )
    made = (record.run, record.engine, record.dtype, record.attention)
    expected = BaselineCell.of(*made, cell.what, cell.protocol, reference)
    if cell != expected:
        raise StaleResult(
            f"{path}: cell_id {cell.cell_id} is not that of its content, {expected.cell_id}; measure it again",
            code="stale.forged-id",
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
    coding, canary, cell = measured.record.coding, measured.record.canary_kl, measured.cell
    expected = cell.windows * len(cell.layers) * len(cell.stream)
    idle = measured.role not in ("rerun", "identity") and coding.fires == 0
    if not coding.fires == coding.expected_fires == expected or idle:
        raise CodecNotActive(
            f"{describe(cell)}: the codec fired {coding.fires} times, expected {expected}"
            + (", but a codec has to fire" if idle else ""),
            code="not-active.idle" if idle else "not-active.fires",
        )
    if cell.layers and not (canary or 0.0) >= CANARY_MIN:
        raise CodecNotActive(
            f"{describe(cell)}: a one-bit codec moved the logits by KL {canary or 0.0:.2g} only;"
            f" at least {CANARY_MIN:g} is expected",
            code="not-active.canary",
        )


def refuse_high_floor(measured: Measured) -> None:
    """`Fault` unless a codec that changes nothing leaves the logits alone, beside this cell and in it."""
    cell, allowed = measured.cell, SAME[measured.cell.dtype]
    floors = [measured.record.floor_kl] if cell.layers else []
    if measured.role == "identity":
        floors.append(float(measured.tokens["kl"].mean()))
    for floor in floors:
        if floor is None or not floor <= allowed:
            raise Fault(
                f"{describe(cell)}: a codec that changes nothing moves the logits by KL {floor}; {cell.dtype} allows"
                f" {allowed:.0e}"
            )


def refuse_wrong_bytes(cells: Sequence[Measured]) -> None:
    """`Fault` unless every cell stores as many values as the others of its span, in a number of bytes that can be."""
    first: dict[str, float] = {}
    for measured in cells:
        cell, coding = measured.cell, measured.record.coding
        values = coding.values / cell.windows
        if values != first.setdefault(cell.span, values) or values <= 0:
            raise Fault(
                f"{describe(cell)}: a window holds {values:g} values of K and V, and {first[cell.span]:g} in others"
            )
        if min(coding.coded_bytes, coding.raw_bytes) < 0 or not 0 < coding.bits_per_value <= MOST_STORED:
            raise Fault(
                f"{describe(cell)}: {coding.coded_bytes} coded and {coding.raw_bytes} other bytes for {coding.values}"
                f" values; allowed: none below 0, and up to {MOST_STORED} bits a value"
            )


def refuse_other_references(cells: Sequence[Measured], allowed: Mapping[str, float]) -> None:
    """Cells of one engine, dtype and way of scoring were held against the same clean pass.

    Parameters
    ----------
    allowed : mapping of str to float
        By dtype, nats that two clean passes may differ by.

    Raises
    ------
    MixedIdentity
        Names the column and the first place where two cells differ.
    """
    longest: dict[tuple, Measured] = {}
    for measured in sorted(cells, key=lambda one: -len(one.tokens)):
        cell = measured.cell
        over = cell.protocol == "snapshot" and bool(cell.layers)
        other = longest.setdefault((cell.engine, cell.dtype, cell.attention, over, cell.text), measured)
        for name in ("nll_ref", "p_ref_max"):
            ours, theirs = measured.tokens[name].to_numpy(), other.tokens[name][: len(measured.tokens)].to_numpy()
            wrong = np.flatnonzero(np.abs(ours - theirs) > allowed[cell.dtype])
            if wrong.size:
                row = int(wrong[0])
                place = f"{name} at window {measured.tokens['window'][row]} position {measured.tokens['position'][row]}"
                raise MixedIdentity(
                    {place: [f"{describe(one.cell)}: {one.tokens[name][row]}" for one in (other, measured)]}
                )


def refuse_unwitnessed(job: JobRecord, tables: Mapping[str, pl.DataFrame], path: Path) -> None:
    """One cell of every family of a job was computed a second time, and what is written of it is what was seen.

    Raises
    ------
    WitnessDisagrees
        A family was not witnessed, or the table holds other numbers than were seen.
    """
    cells = {record.cell_id: record.cell for record in job.cells}
    witnessed = [one for one in job.witnessed if one.cell_id in cells]
    seen = {cells[one.cell_id].family for one in witnessed}
    for cell in cells.values():
        if cell.family and cell.family not in seen:
            raise WitnessDisagrees(
                f"{path}: no witness computed a cell like {describe(cell)} again; measure the job again",
                code="witness.none",
            )
    for one in witnessed:
        rows = tables[one.cell_id].filter(pl.col("window") == one.window)
        kl = float(rows["kl"].mean()) if len(rows) else float("nan")
        if not abs(kl - one.kl) <= WITNESSED * (1 + one.kl) or one.effects != one.expected_effects:
            raise WitnessDisagrees(
                f"{path}: {describe(cells[one.cell_id])} has KL {kl:.6g} on window {one.window}, and the witness saw"
                f" {one.kl:.6g}, with {one.effects} of {one.expected_effects} tensors that reached attention",
                code="witness.other-numbers",
            )


def refuse_one_engine(jobs: Iterable[JobRecord]) -> None:
    """`EnginesDisagree` where what an engine left behind is another's: one of them ran under both names."""
    names: dict[Proof, str] = {}
    for job in jobs:
        for one in job.witnessed:
            engine, proof = job.cells[0].cell.engine, one.engine
            if names.setdefault(proof, engine) != engine or proof.library != ENGINES[engine].library:
                raise EnginesDisagree(
                    f"what ran as {engine} left the proof of another engine: {proof.model} of {proof.library}"
                    f" {proof.version}, {proof.cache_blocks or 'no'} blocks of cache",
                    code="engines-disagree.other-engine",
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

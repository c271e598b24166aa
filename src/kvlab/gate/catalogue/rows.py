"""Rows: checked field by field, and read from files of this project's or of the published style."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.core.recipe import digest
from kvlab.gate.catalogue.columns import COLUMNS
from kvlab.gate.catalogue.strict import read_json
from kvlab.gate.catalogue.values import RowError, Value, shown, taken
from kvlab.gate.reasons import Reason

PUBLISHED_NAMES = {
    "framework": "engine",
    "hw": "device",
    "gpu_type": "device",
    "infmax_model_prefix": "model",
    "result_filename": "run",
    "gpu_mem_peak_gb": "peak_memory_gb",
}
"""Keys of published rows and of the published database, by the field that they mean here."""

PUBLISHED_UNREAD = (
    "artifact_stems",
    "benchmark_certification_status",
    "context_pressure_status",
    "mechanism_eval_registered",
    "quality_eval_registered",
)
"""Keys of published rows that the gate has no use for, or finds out itself."""

EMBEDDED = "mechanism_eval_validation"
EVIDENCE = "evidence"
ROWS = "gate_rows"
"""Under which a verb that writes other things too (`kvlab recommend --json`) has the rows of its file."""


@dataclass(frozen=True)
class Row:
    """One row and what came with it.

    Parameters
    ----------
    values : dict
        The fields in the catalogue's order.
    evidence : tuple of dict
        Evidence that was written into the row's object.
    embedded : dict or None
        The verdict that a published row carries about itself. Kept to be shown, never believed.
    source : str
        Where the row is from, as in ``rows.json row 3``.
    """

    values: dict[str, Value]
    evidence: tuple[dict[str, Any], ...] = ()
    embedded: dict[str, Any] | None = None
    source: str = ""


def checked_row(mapping: Mapping[str, object]) -> dict[str, Value]:
    """A whole row in the catalogue's order; what is absent is None, and a missing `row_id` is computed.

    Only `mechanism` stays absent when it is: who declares nothing has not declared a baseline.

    Raises
    ------
    RowError
        With a reason for every field that is unknown or holds what its column does not allow.
    """
    fields, reasons = taken(mapping)
    if reasons:
        raise RowError(reasons)
    row = fields.model_dump(exclude=set() if "mechanism" in fields.model_fields_set else {"mechanism"})
    return row | {"row_id": fields.row_id or row_id(row)}


def row_id(row: Mapping[str, Value]) -> str:
    """Name of a configuration: the digest of the columns that are `keyed`."""
    return digest({column.name: row.get(column.name) for column in COLUMNS if column.keyed})


def read_rows(path: Path | str) -> list[Row]:
    """The rows of a JSON file: a list of objects, one object, or what an object holds under `ROWS`.

    Raises
    ------
    StorageError
        The file cannot be read.
    RowError
        It is no JSON or not of rows, or a row holds what the catalogue does not allow; every reason names the
        number of the row, from 1, and the field.
    """
    content = read_json(path)
    content = content.get(ROWS, content) if isinstance(content, dict) else content
    entries = content if isinstance(content, list) else [content]
    rows, reasons = [], []
    for number, entry in enumerate(entries, 1):
        try:
            rows.append(_row(entry, f"{path} row {number}"))
        except RowError as error:
            for reason in error.reasons:
                field = f"row {number}, {reason.field}" if reason.field else f"row {number}"
                reasons.append(reason.model_copy(update={"field": field}))
    if reasons:
        raise RowError(reasons, str(path))
    return rows


def _row(entry: object, source: str) -> Row:
    if not isinstance(entry, dict):
        raise RowError([Reason(code="row_not_object", field="", said=f"is {shown(entry)}; allowed: an object")])
    evidence, embedded = _evidence(entry.get(EVIDENCE)), _embedded(entry.get(EMBEDDED))
    return Row(checked_row(_own_names(entry)), evidence, embedded, source)


def _own_names(entry: dict[str, object]) -> dict[str, object]:
    renamed: dict[str, object] = {}
    for key, value in entry.items():
        if key in (EVIDENCE, EMBEDDED, *PUBLISHED_UNREAD):
            continue
        name = PUBLISHED_NAMES.get(key, key)
        if name in renamed:
            said = f"is given twice, once as {key!r}; give it once"
            raise RowError([Reason(code="field_twice", field=name, said=said)])
        renamed[name] = value
    return renamed


def _evidence(found: object) -> tuple[dict[str, Any], ...]:
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        said = f"is {shown(found)}; allowed: a list of objects"
        raise RowError([Reason(code="value_kind", field=EVIDENCE, said=said)])
    return tuple(found)


def _embedded(found: object) -> dict[str, Any] | None:
    if found is not None and not isinstance(found, dict):
        said = f"is {shown(found)}; allowed: an object"
        raise RowError([Reason(code="value_kind", field=EMBEDDED, said=said)])
    return found

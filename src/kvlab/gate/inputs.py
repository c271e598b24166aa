"""What rows are given from outside their file: evidence, what is current, fields that they leave empty.

Nothing is overridden. What two sources say of one thing has to be the same, because whoever states the second has not
seen the first, or means to hide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvlab.core.errors import UserError, suggestion
from kvlab.gate.catalogue.columns import BY_NAME
from kvlab.gate.catalogue.rows import Row, checked_row, row_id
from kvlab.gate.catalogue.strict import read_json
from kvlab.gate.catalogue.values import RowError, Value, shown
from kvlab.gate.evidence import Evidence
from kvlab.gate.evidence.faults import AGEING, IDENTIFYING
from kvlab.gate.reasons import Reason

# ------------------------------------------------------------------------------------ evidence


def attached(rows: Sequence[Row], evidence: Mapping[str, Evidence]) -> list[Row]:
    """The rows with evidence from files, each piece at every row that was measured as it was.

    Parameters
    ----------
    rows : sequence of Row
    evidence : mapping of str to Evidence
        By the name of its file. What a row holds already is not attached again.

    Raises
    ------
    UserError
        A piece is of none of the rows: left out in silence, a bad result could be lost by a slip in a row.
    """
    held = [list(row.evidence) for row in rows]
    for name, piece in evidence.items():
        owners = [number for number, row in enumerate(rows) if not _differences(piece, row)]
        if not owners:
            raise UserError(_of_nobody(name, piece, rows), code="user.no-row")
        content = piece.model_dump(mode="json")
        for number in owners:
            if content not in held[number]:
                held[number].append(content)
    return [replace(row, evidence=tuple(pieces)) for row, pieces in zip(rows, held, strict=True)]


def _differences(piece: Evidence, row: Row) -> list[str]:
    return [name for name in IDENTIFYING if getattr(piece.identity, name) != row.values.get(name)]


def _of_nobody(name: str, piece: Evidence, rows: Sequence[Row]) -> str:
    said = f"{name}: this evidence is of none of the {len(rows)} rows"
    if not rows:
        return said
    nearest = min(rows, key=lambda row: (len(found := _differences(piece, row)), "recipe_id" in found))
    told = (
        f"{field} is {shown(nearest.values.get(field))} there and {shown(getattr(piece.identity, field))} here"
        for field in _differences(piece, nearest)
    )
    return f"{said}; nearest is {nearest.source}: {', '.join(told)}"


# ------------------------------------------------------------------------------- what is current


def read_current(*paths: Path | str) -> dict[str, dict[str, str]]:
    """What is current now, from JSON files: by model its `model_hash`, `corpus_hash` and `code`.

    Raises
    ------
    StorageError
        A file cannot be read.
    RowError
        It is no JSON, or not of that shape; a model lacks one of the three, which would then never be stale; or two
        files say different things of one model.
    """
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        for model, now in _read_current(path).items():
            if found.setdefault(model, now) != now:
                said = f"is {shown(now)} in {path} and {shown(found[model])} in another file"
                raise RowError([Reason(code="field_twice", field=shown(model), said=said)])
    return found


def _read_current(path: Path | str) -> dict[str, dict[str, str]]:
    content = read_json(path)
    if not isinstance(content, dict):
        said = f"holds {shown(content)}; allowed: an object of models"
        raise RowError([Reason(code="row_not_object", field=str(path), said=said)])
    reasons = [reason for model, now in content.items() for reason in _not_current(model, now)]
    if reasons:
        raise RowError(reasons, str(path))
    return content


def _not_current(model: str, now: object) -> Iterator[Reason]:
    allowed = ", ".join(AGEING)
    if not isinstance(now, dict):
        said = f"is {shown(now)}; allowed: an object of {allowed}"
        yield Reason(code="row_not_object", field=shown(model), said=said)
        return
    for name in now:
        if name not in AGEING:
            said = f"is not known; allowed: {allowed}{suggestion(name, AGEING)}"
            yield Reason(code="field_unknown", field=f"{shown(model)}: {shown(name)}", said=said)
    for name in AGEING:
        if not (isinstance(now.get(name), str) and now[name]):
            said = f"is {shown(now.get(name))}; allowed: a digest"
            yield Reason(code="value_kind", field=f"{shown(model)}: {name}", said=said)


# ---------------------------------------------------------------------------- fields left empty


def filled(row: Row, given: Mapping[str, Value]) -> Row:
    """A row whose empty fields hold what flags say; a `row_id` that was computed is computed of the whole row.

    Raises
    ------
    RowError
        A flag says something else than the row (``field_twice``).
    """
    reasons = [
        _said_twice(name, f"{shown(row.values[name])} in {row.source or 'the row'}", f"--{BY_NAME[name].kebab}", value)
        for name, value in given.items()
        if row.values.get(name) not in (None, value)
    ]
    if reasons:
        raise RowError(reasons)
    own = row.values | {"row_id": None if row.values["row_id"] == row_id(row.values) else row.values["row_id"]}
    return replace(row, values=checked_row(own | dict(given)))


def declared(config: Mapping[str, Value], environment: Mapping[str, Value], path: Path | str) -> dict[str, Value]:
    """What a configuration and the environment declare together, the configuration's fields first.

    Raises
    ------
    RowError
        The environment says something else than the configuration, be it null (``field_twice``).
    """
    reasons = [
        _said_twice(name, f"{'null' if config[name] is None else shown(config[name])} in {path}", column.env, value)
        for name, value in environment.items()
        for column in [BY_NAME[name]]
        if name in config and config[name] != value
    ]
    if reasons:
        raise RowError(reasons)
    return dict(config) | dict(environment)


def _said_twice(name: str, first: str, where: str, value: Value) -> Reason:
    said = f"is {first} and {shown(value)} in {where}; nothing is overridden, take one of them out"
    return Reason(code="field_twice", field=name, said=said)

"""The file params.yaml: read, overlaid by presets, and refused in one line that names what is wrong.

Knows nothing of which parameters there are; that is `kvlab.core.params`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from kvlab.core.errors import ParamsError, StorageError, nearest, suggestion
from kvlab.core.limits import MOST_DEPTH, WIDEST, shown
from kvlab.core.strictyaml import from_yaml, read_text

PRESETS = Path("workflow/presets")
KINDS = {
    **{"bool_type": "true or false", "int_type": "a whole number", "float_type": "a number", "string_type": "a text"},
    **{"model_type": "a mapping", "dict_type": "a mapping", "tuple_type": "a list", "none_required": "null"},
}
"""What is allowed where something of another kind is given, by pydantic's name of the problem."""


def read_yaml(path: Path) -> dict:
    """The mapping in a YAML file; `ParamsError` when there is none, or `kvlab.core.strictyaml` refuses it."""
    try:
        data = from_yaml(read_text(path), str(path))
    except StorageError as error:
        raise ParamsError(f"{error}; run where a params.yaml lies, or write one with `kvlab init`") from None
    if not isinstance(data, dict):
        raise ParamsError(f"{path} must hold a mapping of parameters, not {type(data).__name__}")
    return data


def assignment(change: str) -> dict:
    """``a.b=VALUE``, the value in YAML, as nested mappings.

    Raises
    ------
    ParamsError
        It has no ``=``, its value is no YAML, or it names what lies deeper than anything does.
    """
    key, equals, value = change.partition("=")
    if not equals:
        raise ParamsError(f"--set {shown(change)} is not KEY=VALUE; for example --set windows.calib=8")
    parts = key.split(".")
    if len(parts) > MOST_DEPTH:
        raise ParamsError(f"--set {shown(change)} names {len(parts)} levels; allowed: at most {MOST_DEPTH}")
    nested = from_yaml(value, f"the value of --set {shown(change)}")
    for part in reversed(parts):
        nested = {part: nested}
    return nested


def overlay(base: Any, changes: Any, path: tuple[str, ...] = ()) -> Any:
    """`base` with the leaves of `changes` put in.

    Of a list, numbers name the entries that change, as in `models.0.path`. Which keys there are, and what they may be,
    the models of the parameters say.
    """
    if isinstance(base, list) and isinstance(changes, dict):
        return _entries_changed(base, changes, path)
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {key: overlay(base.get(key), value, (*path, str(key))) for key, value in changes.items()}


def _entries_changed(old: list, new: dict, path: tuple[str, ...]) -> list:
    entries = {str(number): entry for number, entry in enumerate(old)}
    for number, change in new.items():
        if str(number) not in entries:
            raise ParamsError(unknown_key(str(number), entries, path))
        entries[str(number)] = overlay(entries[str(number)], change, (*path, str(number)))
    return list(entries.values())


def preset(name: str, base: dict) -> dict:
    """`base` with a preset of ``workflow/presets`` applied.

    A preset that names another one under ``over`` is laid over that one. A section that it makes null has nothing
    but defaults.
    """
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if name not in names:
        raise ParamsError(f"preset {name!r} is not known; allowed: {', '.join(names)}{suggestion(name, names)}")
    changes = read_yaml(PRESETS / f"{name}.yaml")
    if under := changes.pop("over", None):
        base = preset(under, base)
    empty = {key: {} for key, value in changes.items() if value is None and isinstance(base.get(key), dict)}
    return overlay(base, {key: value for key, value in changes.items() if key not in empty}) | empty


def unknown_key(given: str, allowed: Iterable[str], above: tuple = ()) -> str:
    """One line that refuses a key of the section that lies at `above`."""
    given = str(given) if len(str(given)) <= WIDEST else f"{str(given)[:WIDEST]}..."
    near = nearest(given, allowed)
    within = [".".join(map(str, (*above, key))) for key in ([near] if near else sorted(allowed))]
    hint = f"did you mean {within[0]!r}?" if near else f"allowed: {', '.join(within)}"
    return f"unknown parameter {'.'.join(map(str, (*above, given)))!r}; {hint}"


def held_to(kind: Any, data: Any, prefix: tuple) -> Any:
    """`data` as a value of a kind, strictly: neither true nor '3' is a number.

    It is read as JSON, of which pydantic takes a list for a tuple also where it is strict. A model whose validator runs
    before its fields are read makes Python's values of it, of which it does not; those of parameters have none.

    Raises
    ------
    ParamsError
        A line for each mistake.
    """
    try:
        return _adapter(kind).validate_json(to_json(data), strict=True)
    except ValidationError as error:
        raise ParamsError(*_explained(error, kind, prefix)) from None


_adapter = cache(TypeAdapter)


def _explained(error: ValidationError, root: Any, prefix: tuple) -> list[str]:
    """Each problem of a pydantic error as a line with value, rule and nearest name.

    A value that may be of several kinds and is of none has a problem with each of them; the first speaks for it.
    """
    lines: dict[tuple, str] = {}
    for problem in error.errors():
        place, section = _located(root, problem["loc"])
        lines.setdefault(place, _line(problem, section, (*prefix, *place)))
    # a list of which an item is wrong counts as too short as well, and a misspelt key as missing
    inner = {place[:depth] for place in lines for depth in range(len(place))}
    meant = {line.partition("; did you mean ")[2].strip("'?") for line in lines.values()}
    named = {place: ".".join(map(str, (*prefix, *place))) for place in lines}
    return [lines[p] for p in lines if p not in inner and not (lines[p].endswith("is missing") and named[p] in meant)]


def _line(problem: Any, section: Any, location: tuple) -> str:
    name, kind, given = ".".join(map(str, location)), problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return unknown_key(location[-1], _fields(section), location[:-1])
    if kind == "missing":
        return f"parameter {name!r} is missing"
    if kind == "value_error":
        return f"{name + ': ' if name else ''}{problem['msg'].removeprefix('Value error, ')}"
    hint = ""
    if kind == "literal_error":
        allowed = [part.strip(" '") for part in problem["ctx"]["expected"].replace(" or ", ", ").split(",")]
        hint = suggestion(str(given), allowed)
    said = KINDS.get(kind) or problem["msg"].replace("Input should be ", "").replace("String should match", "a text of")
    value = json.dumps(given) if given is None or isinstance(given, bool) else shown(given)
    return f"parameter {name!r} is {value}; allowed: {said}{hint}"


def _located(root: Any, location: tuple) -> tuple[tuple, Any]:
    """The place of a pydantic error without the kinds that a value might have been of, and what lies around it."""
    place, section, here = (), root, root
    for part in location:
        if part != "[key]" and (inner := _inside(here, part)) is not None:
            place, section, here = (*place, part), here, inner
    return place, section


def _inside(kind: Any, part: str | int) -> Any:
    """The annotation of what a key or a number names in a value of a kind; None where it names a kind instead."""
    origin, args = get_origin(kind), get_args(kind)
    if hasattr(kind, "model_fields"):
        return kind.model_fields[part].annotation if part in kind.model_fields else Any
    if origin in (tuple, list):
        return args[0] if isinstance(part, int) else None
    if origin is dict:
        return args[1]
    return next((found for one in args if (found := _inside(one, part)) is not None), None)


def _fields(kind: Any) -> dict[str, Any]:
    """The fields of the model among the kinds of an annotation."""
    return getattr(kind, "model_fields", {}) or next(filter(None, map(_fields, get_args(kind))), {})

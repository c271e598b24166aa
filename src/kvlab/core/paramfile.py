"""The file params.yaml: read, overlaid by presets, and refused in one line that names what is wrong.

Knows nothing of which parameters there are; that is `kvlab.core.params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from kvlab.core.errors import ParamsError, nearest, suggestion
from kvlab.core.plain import MOST_DEPTH, WIDEST, shown
from kvlab.core.strictyaml import from_yaml, read_text

PRESETS = Path("workflow/presets")


def read_yaml(path: Path) -> dict:
    """The mapping in a YAML file; `ParamsError` when there is none, or `kvlab.core.strictyaml` refuses it."""
    data = from_yaml(read_text(path), str(path))
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


def overlay(base: dict, changes: dict) -> dict:
    """`base` with the leaves of `changes` put in.

    Of a list of mappings, numbers name the entries that change, as in `models.0.path`. An entry of `cells` is a
    mapping, or null, which takes it out. Which keys there are the models of the parameters say.
    """
    cells = changes.get("cells")
    for name, entry in cells.items() if isinstance(cells, dict) else ():
        if entry is not None and not isinstance(entry, dict):
            raise ParamsError(
                f"cells.{name} is {shown(entry)}; allowed: a mapping of what it changes, or null to take the entry out"
            )
    return merged(base, changes)


def merged(old: Any, new: Any, path: tuple[str, ...] = ()) -> Any:
    """`new`, and of `old` all that it does not name; numbers in `new` name entries of a list in `old`."""
    if isinstance(old, list) and isinstance(new, dict):
        return _entries_changed(old, new, path)
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), value, (*path, str(key))) for key, value in new.items()}


def _entries_changed(old: list, new: dict, path: tuple[str, ...]) -> list:
    entries = {str(number): entry for number, entry in enumerate(old)}
    for number, change in new.items():
        if str(number) not in entries:
            raise ParamsError(unknown_key(str(number), entries, path))
        entries[str(number)] = merged(entries[str(number)], change, (*path, str(number)))
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


def explained(error: ValidationError, root: Any, prefix: tuple = ()) -> list[str]:
    """Each problem of a pydantic error as a line with value, rule and nearest name.

    A value that may be of several kinds and is of none has a problem with each of them; the first speaks for it.

    Parameters
    ----------
    root : type
        What was validated: a model, or the annotation of a field.
    prefix : tuple
        Where that lies in params.yaml.
    """
    lines: dict[tuple, str] = {}
    for problem in error.errors():
        place = _named(root, problem["loc"])
        lines.setdefault(place, _line(problem, _at(root, place[:-1]), (*prefix, *place)))
    # a list of which an item is wrong counts as too short as well, and a misspelt key as missing
    inner = {place[:depth] for place in lines for depth in range(len(place))}
    meant = {line.partition("; did you mean ")[2].strip("'?") for line in lines.values()}
    named = {place: ".".join(map(str, (*prefix, *place))) for place in lines}
    return [lines[p] for p in lines if p not in inner and not (lines[p].endswith("is missing") and named[p] in meant)]


def switched(root: Any, data: Any, prefix: tuple = (), place: tuple = ()) -> Iterator[str]:
    """A line for each true or false where a number belongs, for which Python would take it.

    Parameters
    ----------
    root : type
        What `data` is to be: a model, or the annotation of a field.
    prefix : tuple
        Where that lies in params.yaml.
    """
    held = dict(enumerate(data)) if isinstance(data, list | tuple) else data
    for key, value in held.items() if isinstance(held, dict) else ():
        yield from switched(root, value, prefix, (*place, key))
    kinds = _kinds(_at(root, place)) if isinstance(data, bool) else []
    if bool not in kinds and {int, float} & set(kinds):
        name = ".".join(map(str, (*prefix, *place)))
        yield f"parameter {name!r} is {str(data).lower()}; allowed: a number"


def _line(problem: Any, section: Any, location: tuple) -> str:
    name = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return unknown_key(location[-1], _model(section).model_fields, location[:-1])
    if problem["type"] == "missing":
        return f"parameter {name!r} is missing"
    if problem["type"] == "value_error":
        return f"{name + ': ' if name else ''}{problem['msg'].removeprefix('Value error, ')}"
    hint = ""
    if problem["type"] == "literal_error":
        allowed = [part.strip(" '") for part in problem["ctx"]["expected"].replace(" or ", ", ").split(",")]
        hint = suggestion(str(problem["input"]), allowed)
    allowed_text = problem["msg"].replace("Input should be", "allowed:")
    return f"parameter {name!r} is {shown(problem['input'])}; {allowed_text}{hint}"


def _named(root: Any, location: tuple) -> tuple:
    """A place in a pydantic error without the kinds that a value might have been of: its keys and numbers."""
    place: tuple = ()
    for part in location:
        here = _at(root, place)
        holds = {get_origin(kind) for kind in _kinds(here)}
        keyed = (_model(here) is not None or dict in holds) and part != "[key]"
        if keyed or (isinstance(part, int) and holds & {tuple, list}):
            place = (*place, part)
    return place


def _at(root: Any, location: tuple) -> Any:
    """The type of what lies at a place."""
    here = root
    for part in location:
        section = _model(here)
        if section is not None and part in section.model_fields:
            here = section.model_fields[part].annotation
        else:  # an entry of a list or of a mapping
            inner = [kind for kind in _kinds(here) if get_origin(kind) in (tuple, list, dict)]
            here = get_args(inner[0])[get_origin(inner[0]) is dict] if inner else Any
    return here


def _kinds(annotation: Any) -> list:
    """An annotation, or all that it allows."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for one in get_args(annotation) for kind in _kinds(one)]
    return [annotation]


def _model(annotation: Any) -> type[BaseModel] | None:
    """The model among the kinds of an annotation."""
    return next((kind for kind in _kinds(annotation) if hasattr(kind, "model_fields")), None)

"""The one table of a model's numbers: a row is one estimand at some levels of the factors, with its interval.

``metrics.json`` is that table. A study declares its parts of it: fields that are a `Level` (what a row is about), an
`Estimand` (a number, mostly with an interval), a `VerdictField` (what was read off the numbers), or rows of their
own. From that declaration `melt` makes rows of what a study found, and `gather` makes of the rows what pages read: for
each part its rows side by side, an estimand beside the other. Neither knows a study.

Levels are inherited: a row of a part inside another carries those of the row that it is inside of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

from kvlab.core.errors import Fault, StaleResult
from kvlab.core.recipe import DType, Engine, Protocol, Stream
from kvlab.stats.bootstrap import Estimate

NATS, BITS = "nats per token", "bits per value"
RATIO, SHARE, PROBABILITY = "ratio", "share", "probability"
COUNT, TOKENS, BYTES, WINDOWS, DECIBELS = "count", "tokens", "bytes", "windows", "dB"
INTERVAL = tuple(field.name for field in fields(Estimate))


@dataclass(frozen=True)
class Level:
    """A field that says what a row is about: text, number, yes or no, or a list of these.

    Parameters
    ----------
    means : str
    name : str, optional
        Of its column, where another field inside has its own name.
    """

    means: str = ""
    name: str | None = None


@dataclass(frozen=True)
class Estimand:
    """A field that is a number: an `Estimate`, one that was counted and has no interval, or None for none."""

    unit: str
    means: str = ""


@dataclass(frozen=True)
class VerdictField:
    """A field that says what follows from a row's numbers, in one of these words; None where nothing does."""

    words: tuple[str, ...]
    means: str = ""


@dataclass(frozen=True)
class Compared:
    """The field that names the cells that a row sets against each other, two sides of `Reference`; None for none."""


@dataclass(frozen=True)
class Sentences:
    """A part that is no numbers: what is said of others, which ``notes`` of ``metrics.json`` keeps."""

    means: str = ""


Field = Any
"""`Level`, `Estimand`, `VerdictField`, `Compared`, a dict of these by fixed keys, or rows."""


@dataclass(frozen=True)
class Several:
    """A list of rows, each with these fields."""

    fields: Mapping[str, Field]


@dataclass(frozen=True)
class By:
    """Rows by one level, their key in a dict; where `fields` is an `Estimand`, each value is that number."""

    level: str
    fields: Mapping[str, Field] | Estimand


@dataclass(frozen=True)
class Single:
    """One row, or None."""

    fields: Mapping[str, Field]


class Entry(BaseModel):
    """A value of ``metrics.json``: immutable, closed against unknown fields, finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Reference(Entry):
    """A cell that a row compares: its id, where it was measured, and what it stores."""

    cell_id: str
    study: str
    label: str
    engine: Engine
    dtype: DType
    protocol: Protocol
    stream: Stream
    bits_per_value: float | None
    """Of the whole cache; null for a cell that stores nothing."""

    @property
    def name(self) -> str:
        """By which rows name it."""
        return f"{self.study}/{self.cell_id}"


class EstimateRow(Entry):
    """One estimand at some levels of the factors."""

    study: str
    part: str
    """The part of the study, and after dots the part inside it, that the row is of; `$defs` of this schema has them."""
    levels: dict[str, JsonValue]
    """Factors and what else the row is about, by name."""
    estimand: str
    value: int | float | None
    """Null where the row has no such number."""
    low: float | None = None
    """Ends of the two-sided interval, by resampling windows; null of a number that was counted."""
    high: float | None = None
    unit: str
    n_windows: int | None = None
    """Windows of text that it was measured on; they are what is resampled."""
    n_tokens: int | None = None
    """Tokens in these windows."""
    n_documents: int | None = None
    """Documents that the windows are of: these are what is resampled; null where every window stands for itself."""
    method: str | None = None
    """How the interval was made: bca, percentile, t (Student's, over windows), exact (a rate of 0 or 1) or mover."""
    confidence: float | None = None
    """Of the interval, two-sided."""
    verdict: str | None = None
    """What was read off the numbers of these levels, where the part has a word for it."""
    cells: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """What is set against what, by the names of `compared`; the cells of one side are added up."""

    @model_validator(mode="after")
    def _inside(self) -> EstimateRow:
        """A value lies in its own interval, up to rounding; a probability is one."""
        if self.low is not None:
            Estimate(**self.number())
        if self.unit == PROBABILITY and self.value is not None and not 0 <= self.value <= 1:
            raise ValueError(f"{self.estimand} is {self.value:g}, no probability")
        return self

    def number(self) -> dict | int | float | None:
        """The number as pages read it: an interval as ``Estimate.to_json``, else the value alone."""
        if self.low is None:
            return self.value
        return {name: getattr(self, name) for name in INTERVAL}


# ---------------------------------------------------------------------------------- from studies to rows


def melt(study: str, part: str, declared: Field, found: Any) -> Iterator[tuple[EstimateRow, list[Reference]]]:
    """The rows of a part, and the cells that each names.

    Parameters
    ----------
    declared : Several, By or Single
    found : list or dict
        What the study made, in the shape that is declared.

    Raises
    ------
    Fault
        It has other fields than are declared, or a number that is none.
    """
    yield from _melted(study, part, declared, found, {}, None)


def _melted(study: str, part: str, declared: Field, found: Any, above: dict, compared) -> Iterator:
    for levels, fields_, body in _bodies(part, declared, found):
        flat = dict(_flat(part, fields_, body))
        own = {spec.name or name: _plain(value) for name, (spec, value) in flat.items() if isinstance(spec, Level)}
        if twice := (levels | own).keys() & above.keys():
            raise Fault(f"{part} has the levels {sorted(twice)} twice; give one of them another name")
        levels = above | levels | own
        given = [value for spec, value in flat.values() if isinstance(spec, Compared)]
        sides = given[0] if given else compared
        references = [[Reference(**cell) for cell in side] for side in sides] if sides else None
        named = references and tuple(tuple(cell.name for cell in side) for side in references)
        verdict = next(
            (_word(part, name, *pair) for name, pair in flat.items() if isinstance(pair[0], VerdictField)), None
        )
        for name, (spec, value) in flat.items():
            if isinstance(spec, Estimand):
                row = {"study": study, "part": part, "levels": levels, "estimand": name, "unit": spec.unit}
                row |= {"verdict": verdict, "cells": named} | _number(f"{part}.{name}", value)
                yield EstimateRow(**row), [cell for side in references or () for cell in side]
        for name, (spec, value) in flat.items():
            if isinstance(spec, Several | By | Single):
                yield from _melted(study, f"{part}.{name}", spec, value, levels, sides)


def _bodies(part: str, declared: Field, found: Any) -> Iterator[tuple[dict, Mapping[str, Field], Mapping]]:
    """Each row as the level that is its key, its fields and their values."""
    if isinstance(declared, By):
        for key, body in (found or {}).items():
            number = {_last(part): declared.fields} if isinstance(declared.fields, Estimand) else None
            yield {declared.level: key}, number or declared.fields, {_last(part): body} if number else body
    elif isinstance(declared, Single):
        yield from [({}, declared.fields, found)] if found else []
    else:
        yield from (({}, declared.fields, body) for body in found or ())


def _flat(part: str, declared: Mapping[str, Field], body: Mapping, before: str = "") -> Iterator[tuple[str, tuple]]:
    """Name, field and value; fields by fixed keys are named by their path."""
    if body.keys() != declared.keys():
        wrong = sorted(map(str, body.keys() ^ declared.keys()))
        raise Fault(
            f"a row of {part} has other fields than are declared: {', '.join(wrong)}", code="fault.other-fields"
        )
    for name, spec in declared.items():
        if isinstance(spec, Mapping):
            yield from _flat(part, spec, body[name], f"{before}{name}.")
        else:
            yield before + name, (spec, body[name])


def _plain(value: Any) -> JsonValue:
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _word(part: str, name: str, declared: VerdictField, value: str | None) -> str | None:
    if value is not None and value not in declared.words:
        raise Fault(f"{part}.{name} is {value!r}, and may be {', '.join(declared.words)}", code="fault.no-verdict")
    return value


def _number(name: str, value: Any) -> dict:
    """The columns that a number fills."""
    if isinstance(value, Estimate):
        return value.to_json()
    if isinstance(value, dict) and value.keys() == set(INTERVAL):
        return value
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return {"value": value}
    raise Fault(f"{name} is {value!r}, which is no number", code="fault.no-number")


# ----------------------------------------------------------------------------------- from rows to pages


def gather(part: str, declared: Field, rows: Sequence[EstimateRow], compared: Mapping[str, Reference]) -> Any:
    """A part as its study made it, from its rows; None of a `Single` without any.

    Raises
    ------
    StaleResult
        A row is lacking, is there twice, or says what the declaration does not allow.
    """
    own, single = _levels(part, declared), isinstance(declared, Single)
    groups: dict[str, list[EstimateRow]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row.levels.get(name) for name in own]), []).append(row)
    if single and len(groups) > 1:
        raise StaleResult(f"{part} is there {len(groups)} times; run `kvlab step metrics` again", code="stale.twice")
    bodies = [_gathered(part, declared, mine, compared) for mine in groups.values()]
    if isinstance(declared, By):
        return {mine[0].levels[declared.level]: body for mine, body in zip(groups.values(), bodies, strict=True)}
    return (bodies[0] if bodies else None) if single else bodies


def _gathered(part: str, declared: Field, rows: Sequence[EstimateRow], compared: Mapping[str, Reference]) -> Any:
    """One row, from those of its levels and of everything inside it."""
    own = [row for row in rows if row.part == part]
    by_name = {row.estimand: row for row in own}
    wanted = [name for name, spec in _named(part, declared) if isinstance(spec, Estimand)]
    if missing := [name for name in _levels(part, declared) if name not in rows[0].levels]:
        raise StaleResult(f"{part} lacks the levels {missing}; run `kvlab step metrics` again", code="stale.levels")
    if sorted(row.estimand for row in own) != sorted(wanted):
        wrong = sorted(set(wanted) ^ by_name.keys()) or "an estimand twice"
        raise StaleResult(f"{part} at {rows[0].levels} lacks or has too much: {wrong}", code="stale.other-rows")
    if isinstance(declared.fields, Estimand):
        return own[0].number()

    def value(name: str, spec: Field) -> Any:
        if isinstance(spec, Mapping):
            return {key: value(f"{name}.{key}", inside) for key, inside in spec.items()}
        if isinstance(spec, Level):
            return rows[0].levels[spec.name or name]
        if isinstance(spec, Estimand):
            return by_name[name].number()
        if isinstance(spec, VerdictField):
            if (word := own[0].verdict) is not None and word not in spec.words:
                raise StaleResult(
                    f"{part}.{name} is {word!r}, and may be {', '.join(spec.words)}", code="stale.verdict"
                )
            return word
        if isinstance(spec, Compared):
            return rows[0].cells and [[compared[one].model_dump() for one in side] for side in rows[0].cells]
        inside = f"{part}.{name}"
        return gather(inside, spec, [row for row in rows if _is_of(row.part, inside)], compared)

    return {name: value(name, spec) for name, spec in declared.fields.items()}


def _is_of(part: str, other: str) -> bool:
    """Whether a part is another one, or inside it."""
    return part == other or part.startswith(f"{other}.")


def _last(part: str) -> str:
    """What a number of a part is called that has no other field."""
    return part.rpartition(".")[2]


def _named(part: str, declared: Field) -> Iterator[tuple[str, Field]]:
    """The fields of a part by the path that names them."""
    if isinstance(declared.fields, Estimand):
        return iter([(_last(part), declared.fields)])
    return _paths(declared.fields)


def _paths(declared: Mapping[str, Field], before: str = "") -> Iterator[tuple[str, Field]]:
    for name, spec in declared.items():
        yield from _paths(spec, f"{before}{name}.") if isinstance(spec, Mapping) else [(before + name, spec)]


def _levels(part: str, declared: Field) -> list[str]:
    """The levels that a row of a part has of its own."""
    keyed = [declared.level] if isinstance(declared, By) else []
    return keyed + [spec.name or name for name, spec in _named(part, declared) if isinstance(spec, Level)]


def described(part: str, declared: Field) -> dict[str, dict]:
    """By part, and those inside it, the JSON schema of its rows: their levels, and estimands with their units."""
    named = dict(_named(part, declared))
    levels = {declared.level: ""} if isinstance(declared, By) else {}
    levels |= {spec.name or name: spec.means for name, spec in named.items() if isinstance(spec, Level)}
    verdicts = [spec for spec in named.values() if isinstance(spec, VerdictField)]
    rows = {
        "levels": {"properties": {name: _said(means) for name, means in levels.items()}, "required": [*levels]},
        "estimand": {
            "oneOf": [
                {"const": name} | _said("; ".join(filter(None, (spec.unit, spec.means))))
                for name, spec in named.items()
                if isinstance(spec, Estimand)
            ]
        },
    }
    if verdicts:
        rows["verdict"] = {"enum": [*verdicts[0].words, None]} | _said(verdicts[0].means)
    if not rows["estimand"]["oneOf"]:
        del rows["estimand"]
    found = {part: {"properties": rows}}
    for name, spec in named.items():
        if isinstance(spec, Several | By | Single):
            found |= described(f"{part}.{name}", spec)
    return found


def _said(means: str) -> dict[str, str]:
    return {"description": means} if means else {}


def named_cells(references: Iterable[Reference]) -> dict[str, Reference]:
    """Cells by the name by which rows name them; `Fault` where two have one name."""
    found: dict[str, Reference] = {}
    for one in references:
        if found.setdefault(one.name, one) != one:
            raise Fault(f"two cells have the name {one.name!r}", code="fault.cell-name")
    return found

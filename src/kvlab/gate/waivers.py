"""Waivers: a named person answers for one criterion of one row until a day; a file of them read strictly."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, StringConstraints, ValidationError, model_validator

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import UserError, suggestion
from kvlab.gate.catalogue.strict import read_yaml

CONFIGURATION = {
    "model": "model",
    "engine": "engine",
    "mechanism": "mechanism",
    "variant": "mechanism_variant",
}  # a waiver's key -> the row's field


class WaiverError(UserError):
    """A waiver says too little to be answered for, or what holds them is no list."""

    code = "waiver"


def _day(given: object) -> object:
    """An ISO date; YAML reads it as one by itself. Numbers and times of day are refused."""
    if isinstance(given, datetime.datetime) or not isinstance(given, str | datetime.date):
        raise ValueError(f"{given!r} is no date such as 2030-01-31")
    try:
        return datetime.date.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        raise ValueError(f"{given!r} is no date such as 2030-01-31") from None


Words = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, strict=True)]
Day = Annotated[datetime.date, BeforeValidator(_day)]


class Waiver(Frozen):
    """One criterion that some row need not meet, who answers for it, until when (that day included) and why.

    The row is named by its `row_id`, or all rows of a configuration by the four other fields together.
    """

    row_id: Words | None = None
    model: Words | None = None
    engine: Words | None = None
    mechanism: Words | None = None
    variant: Words | None = None
    criterion: Words
    owner: Words
    expires: Day
    why: Words

    @model_validator(mode="after")
    def _names_rows(self) -> Waiver:
        given = [key for key in CONFIGURATION if getattr(self, key) is not None]
        if self.row_id is not None and given:
            raise ValueError(f"names row_id and {', '.join(given)}; allowed: row_id, or {', '.join(CONFIGURATION)}")
        if self.row_id is None and len(given) < len(CONFIGURATION):
            raise ValueError(f"names no row; allowed: row_id, or {', '.join(CONFIGURATION)} together")
        return self

    def covers(self, values: Mapping, criterion: str) -> bool:
        """Whether it speaks of this criterion of the row with these values."""
        if criterion != self.criterion:
            return False
        if self.row_id is not None:
            return values.get("row_id") == self.row_id
        return all(values.get(field) == getattr(self, key) for key, field in CONFIGURATION.items())

    def expired(self, today: datetime.date) -> bool:
        """Whether its last day has gone by."""
        return today > self.expires


def read(path: Path | str, waivable: Collection[str]) -> tuple[Waiver, ...]:
    """The waivers of a YAML file, in a fixed order.

    Parameters
    ----------
    path : path
        A list of mappings with the keys of `Waiver`.
    waivable : collection of str
        Criteria that may be waived (`kvlab.gate.rules.WAIVABLE`).

    Raises
    ------
    kvlab.core.errors.StorageError
        The file cannot be read.
    kvlab.gate.catalogue.values.RowError
        It is no YAML, or gives a key twice.
    WaiverError
        It is no list, or an entry lacks its owner, its last day, its reason or its row, has a key that is none, or
        waives what cannot be waived.
    """
    return parse(read_yaml(path), waivable, str(path))


def parse(data: object, waivable: Collection[str], origin: str = "waivers") -> tuple[Waiver, ...]:
    """`read` from data; None, an empty file, holds no waivers."""
    if data is None:
        return ()
    if not isinstance(data, list):
        raise WaiverError(f"{origin} must hold a list of waivers, not {type(data).__name__}", code="waiver.no-list")
    found = {_waiver(entry, waivable, f"{origin}, waiver {number}") for number, entry in enumerate(data, start=1)}
    return tuple(sorted(found, key=Waiver.model_dump_json))


def _waiver(entry: object, waivable: Collection[str], origin: str) -> Waiver:
    if not isinstance(entry, dict):
        raise WaiverError(f"{origin} must be a mapping, not {type(entry).__name__}", code="waiver.no-mapping")
    for key in entry:
        if key not in Waiver.model_fields:
            hint = suggestion(str(key), Waiver.model_fields)
            raise WaiverError(
                f"{origin} has the key {key!r}; allowed: {', '.join(Waiver.model_fields)}{hint}",
                code="waiver.unknown-key",
            )
    try:
        waiver = Waiver.model_validate(entry)
    except ValidationError as error:
        raise WaiverError(f"{origin}: {_first(error)}", code="waiver.value") from None
    if waiver.criterion not in waivable:
        hint = suggestion(waiver.criterion, waivable)
        raise WaiverError(
            f"{origin} waives {waiver.criterion!r}; what may be waived: {', '.join(sorted(waivable))}{hint}",
            code="waiver.criterion",
        )
    return waiver


def _first(error: ValidationError) -> str:
    """The first problem that pydantic found, in the words of a waiver's author."""
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{key} is missing; a waiver has a criterion, an owner, a last day `expires` and a reason `why`"
    if problem["type"] == "value_error":
        return " ".join(filter(None, [key, problem["msg"].removeprefix("Value error, ")]))
    return f"{key} is {problem['input']!r}; allowed: a word or more"

"""Everything that is made of the columns: configuration, environment, flags, schemas, database columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, WithJsonSchema, create_model

from kvlab.core.codec_settings import Frozen
from kvlab.gate.catalogue.columns import BY_NAME, COLUMNS, DECLARED, MOST_CHARACTERS, Group, RowColumn
from kvlab.gate.catalogue.rows import EMBEDDED, EVIDENCE, fields
from kvlab.gate.catalogue.strict import read_yaml
from kvlab.gate.catalogue.values import CONTROL, OUTER_SPACE, RowError, Value, bounds, checked, parsed, shown
from kvlab.gate.reasons import Reason

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
SQL_TYPES = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}
JSON_TYPES = {str: "string", int: "integer", bool: "boolean", float: "number"}


def declared(groups: tuple[Group, ...] = DECLARED) -> tuple[RowColumn, ...]:
    """The columns of some groups; by default those that a person may state."""
    return tuple(column for column in COLUMNS if column.group in groups)


# ------------------------------------------------------------------------------- what a person states


def environment(env: Mapping[str, str]) -> dict[str, Value]:
    """What an environment declares; a variable that is unset or empty declares nothing.

    Raises
    ------
    RowError
        A variable holds what its column does not allow.
    """
    found = {column.name: parsed(column, env[column.env]) for column in declared() if env.get(column.env)}
    reasons = [
        Reason(code=value.code, field=BY_NAME[name].env, said=value.said)
        for name, value in found.items()
        if isinstance(value, Reason)
    ]
    if reasons:
        raise RowError(reasons)
    return found


def read_config(path: Path | str) -> dict[str, Value]:
    """What a YAML file declares, as `from_config`; a key that is written twice is refused too."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        said = f"holds {shown(content)}; allowed: a mapping of fields"
        raise RowError([Reason(code="row_not_object", field=str(path), said=said)])
    try:
        return from_config(content)
    except RowError as error:
        raise RowError(error.reasons, str(path)) from None


def from_config(mapping: Mapping[str, object]) -> dict[str, Value]:
    """What a configuration declares, its keys in kebab-case or snake_case.

    An absent key stays absent, an explicit null is None: who says nothing of `mechanism` has not said none.

    Raises
    ------
    RowError
        A key is unknown, is there in both spellings, or holds what its column does not allow.
    """
    names = {column.kebab: column.name for column in declared()}
    own = [names.get(key, key) for key in mapping]
    twice = [name for name in dict.fromkeys(own) if own.count(name) > 1]
    if twice:
        said = "is given in both spellings; give it once"
        raise RowError([Reason(code="field_twice", field=name, said=said) for name in twice])
    values, reasons = fields(dict(zip(own, mapping.values(), strict=True)), names.values())
    if reasons:
        raise RowError(reasons)
    return values


def flags(groups: tuple[Group, ...] = DECLARED) -> list[Parameter]:
    """A parameter of a verb of the command line for each column of `groups`; `from_flags` reads their values."""
    from typer import Option

    found = []
    for column in declared(groups):
        unit = f" [{column.unit}]" if column.unit else ""
        words = f"; one of {', '.join(column.choices)}" if column.choices else ""
        option = Option(
            f"--{column.kebab}",
            parser=_flag(column),
            metavar=column.kind.__name__.upper(),
            help=f"{column.text}{unit}{words}",
        )
        kind = Annotated[column.kind | None, option]
        found.append(Parameter(column.name, Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    return found


def from_flags(values: Mapping[str, Value]) -> dict[str, Value]:
    """The fields that flags declared; an empty one declares nothing."""
    return {name: value for name, value in values.items() if name in BY_NAME and value is not None}


def _flag(column: RowColumn) -> Callable[[str], Value]:
    from typer import BadParameter

    def value(text: str) -> Value:
        found = parsed(column, text)
        if isinstance(found, Reason):
            raise BadParameter(found.said)
        return found

    return value


class _Config(Frozen):
    """Closed, immutable, keys in either spelling."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True)


def _validated(column: RowColumn, value: object) -> Value:
    """`checked` as pydantic calls it."""
    found = checked(column, value)
    if isinstance(found, Reason):
        raise ValueError(f"{found.field} {found.said}")
    return found


def column_schema(column: RowColumn) -> dict:
    """JSON schema of one column's values; null and the empty text say nothing, whatever the column's kind."""
    told = {"description": column.text + (f" [{column.unit}]" if column.unit else "")}
    if column.kind is not str:
        low, high = bounds(column)
        ends = {key: end for key, end in (("minimum", low), ("maximum", high)) if end is not None}
        return told | {"type": [JSON_TYPES[column.kind], "null", "string"], "maxLength": 0} | ends
    if column.choices and not column.joined:
        return told | {"enum": [*column.choices, "", None]}
    refused = {"type": "string", "pattern": f"{OUTER_SPACE}|{CONTROL}"}
    text = {"type": ["string", "null"], "maxLength": MOST_CHARACTERS, "not": refused}
    word = f"({'|'.join(column.choices)})"
    return told | text | ({"pattern": rf"^({word}(\+{word})*)?$"} if column.choices else {})


MechanismConfig = create_model(
    "MechanismConfig",
    __base__=_Config,
    __doc__="What a configuration declares of a row.",
    **{
        column.name: (
            Annotated[
                column.kind | None, BeforeValidator(partial(_validated, column)), WithJsonSchema(column_schema(column))
            ],
            None,
        )
        for column in declared()
    },
)


# ------------------------------------------------------------------------------------ what files hold


def row_schema() -> dict:
    """JSON schema of one row in this project's style, with what may be attached to it."""
    attached = {
        EVIDENCE: {
            "description": "what measuring stages wrote of this row; each as `kvlab gate schema evidence` says",
            "type": ["array", "null"],
            "items": {"type": "object"},
        },
        EMBEDDED: {
            "description": "the verdict that a published row carries about itself; kept, never believed",
            "type": ["object", "null"],
        },
    }
    return {
        "$schema": SCHEMA,
        "title": "Row",
        "description": "One measured configuration. Rows of the published style, with keys such as `framework` and "
        "`hw`, are read too and are not described here.",
        "type": "object",
        "properties": {column.name: column_schema(column) for column in COLUMNS} | attached,
        "additionalProperties": False,
    }


def config_schema() -> dict:
    """JSON schema of a configuration, its keys in kebab-case."""
    return {"$schema": SCHEMA} | MechanismConfig.model_json_schema(by_alias=True)


def sql_columns() -> list[tuple[str, str]]:
    """Name and SQLite type of each column, in order."""
    return [(column.name, SQL_TYPES[column.kind]) for column in COLUMNS]


def groupable() -> tuple[str, ...]:
    """Names of the columns that a query may group by."""
    return tuple(column.name for column in COLUMNS if column.groupable)

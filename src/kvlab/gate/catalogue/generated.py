"""Everything that is made of the columns: configuration, environment, flags, schemas, database columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Annotated

from pydantic.json_schema import GenerateJsonSchema

from kvlab.gate.catalogue.columns import BY_NAME, COLUMNS, DECLARED, DeclaredFields, Group, RowColumn, RowFields
from kvlab.gate.catalogue.rows import EMBEDDED, EVIDENCE
from kvlab.gate.catalogue.strict import read_yaml
from kvlab.gate.catalogue.values import RowError, Value, parsed, shown, taken
from kvlab.gate.reasons import Reason

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL"}


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
    fields, reasons = taken(dict(zip(own, mapping.values(), strict=True)), DeclaredFields)
    if reasons:
        raise RowError(reasons)
    return fields.model_dump(exclude_unset=True)


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


# ------------------------------------------------------------------------------------ what files hold


class _Schema(GenerateJsonSchema):
    """Null and the empty text say nothing, whatever the field's kind; what is left out has no default."""

    def nullable_schema(self, schema) -> dict:
        return {"anyOf": [self.generate_inner(schema["schema"]), {"enum": ["", None]}]}

    def default_schema(self, schema) -> dict:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema) -> bool:
        return False


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
    fields = RowFields.model_json_schema(schema_generator=_Schema)
    return fields | {
        "$schema": SCHEMA,
        "title": "Row",
        "description": "One measured configuration. Rows of the published style, with keys such as `framework` and "
        "`hw`, are read too and are not described here.",
        "properties": fields["properties"] | attached,
    }


def config_schema() -> dict:
    """JSON schema of a configuration, its keys in kebab-case."""
    fields = DeclaredFields.model_json_schema(schema_generator=_Schema)
    return fields | {
        "$schema": SCHEMA,
        "title": "Configuration",
        "description": "What a configuration declares of a row.",
        "properties": {BY_NAME[name].kebab: said for name, said in fields["properties"].items()},
    }


def sql_columns() -> list[tuple[str, str]]:
    """Name and SQLite type of each column, in order."""
    return [(column.name, SQL_TYPES[column.kind]) for column in COLUMNS]


def groupable() -> tuple[str, ...]:
    """Names of the columns that a query may group by."""
    return tuple(column.name for column in COLUMNS if column.groupable)

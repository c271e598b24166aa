"""Fields taken as they are written, or refused with a reason; what a text of the environment or a flag stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from kvlab.core.errors import UserError, suggestion
from kvlab.gate.catalogue.columns import BY_NAME, MechanismFields, RowColumn, RowFields
from kvlab.gate.catalogue.kinds import MOST_CHARACTERS, MOST_EXACT
from kvlab.gate.reasons import CONFIG_REASONS, Reason

Value = str | int | float | None
Fields = TypeVar("Fields", bound=MechanismFields)

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SHOWN = 60  # characters of a refused value
_LISTED = 5  # reasons in one line

CODE_OF = {
    "finite_number": "value_not_finite",
    "greater_than_equal": "value_out_of_range",
    "less_than_equal": "value_out_of_range",
    "literal_error": "value_unknown_word",
    "string_pattern_mismatch": "value_unknown_word",
    "string_too_long": "value_too_long",
    "string_unicode": "value_control_character",
}
"""By pydantic's type of an error; `kvlab.gate.catalogue.kinds` has the others, and what is none is ``value_kind``."""


class RowError(UserError):
    """A row, a configuration or an environment holds what its catalogue does not allow.

    Parameters
    ----------
    reasons : sequence of Reason
        All of them; the message is one line.
    where : str
        The file that they are about, if there is one.
    """

    code = "row"

    def __init__(self, reasons: Sequence[Reason], where: str = ""):
        self.reasons = tuple(reasons)
        told = "; ".join(f"{reason.field} {reason.said}" for reason in self.reasons[:_LISTED])
        more = len(self.reasons) - _LISTED
        super().__init__((f"{where}: " if where else "") + told + (f"; and {more} more" if more > 0 else ""))


def shown(value: object) -> str:
    """A value as a message shows it: in one line, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def taken(given: Mapping[Any, object], model: type[Fields] = RowFields) -> tuple[Fields, list[Reason]]:
    """The fields of a mapping as far as they are right, and what is wrong with the others.

    None and the empty text say nothing and are None. A whole number is a number too; nothing else changes its kind.
    """
    known = {name: value for name, value in given.items() if name in model.model_fields}
    reasons = {name: unknown(name, model.model_fields) for name in given if name not in known}
    try:
        return model.model_validate(known), list(reasons.values())
    except ValidationError as error:
        for problem in error.errors():
            name = str(problem["loc"][0])
            reasons.setdefault(name, _reason(BY_NAME[name], known[name], problem["type"]))
    right = {name: value for name, value in known.items() if name not in reasons}
    return model.model_validate(right), [reasons[name] for name in given if name in reasons]


def unknown(name: object, allowed: Iterable[str]) -> Reason:
    """The reason that refuses a field's name and says the nearest one, or all."""
    hint = suggestion(str(name).lower().replace("-", "_"), allowed) or f"; allowed: {', '.join(allowed)}"
    return Reason(code="field_unknown", field=shown(name), said=f"is no field{hint}")


def checked(column: RowColumn, value: object) -> Value | Reason:
    """The value as a row holds it, or the reason why a row cannot hold it."""
    row, reasons = taken({column.name: value})
    return reasons[0] if reasons else getattr(row, column.name)


def parsed(column: RowColumn, text: str) -> Value | Reason:
    """What a text from the environment or the command line stands for, or why it stands for nothing."""
    if text == "" or column.kind is str:
        return checked(column, text)
    if _NUMBER.fullmatch(text) is None:
        spelt = text.lower().lstrip("+-") in ("nan", "inf", "infinity")
        return _refused("value_not_finite" if spelt else "value_not_a_number", column, text)
    if column.kind is float:
        return checked(column, float(text))
    if _WHOLE.fullmatch(text) is None:
        return _refused("value_not_whole", column, text)
    if len(text) > _SHOWN:  # far too large, and the parser of whole numbers has a limit of its own
        return _refused("value_out_of_range", column, text)
    return checked(column, int(text))


def _reason(column: RowColumn, value: object, problem: str) -> Reason:
    """What pydantic says is wrong, as the gate says it."""
    code = CODE_OF.get(problem, problem if problem in CONFIG_REASONS else "value_kind")
    if code == "value_unknown_word" and not isinstance(value, str):
        code = "value_kind"
    return _refused(code, column, value)


def _refused(code: str, column: RowColumn, value: object) -> Reason:
    match code:
        case "value_too_long":
            allowed = f"at most {MOST_CHARACTERS} characters"
        case "value_control_character":
            allowed = "one line without control characters"
        case "value_outer_space":
            allowed = f"{shown(str(value).strip())} without the space around it"
        case "value_unknown_word":
            allowed = column.allowed + suggestion(str(value).strip().lower(), column.choices)
        case "value_out_of_range" if column.kind is float and type(value) is int and abs(value) > MOST_EXACT:
            allowed = f"a number; whole ones up to {MOST_EXACT}"
        case _:
            allowed = column.allowed
    return Reason(code=code, field=column.name, said=f"is {shown(value)}; allowed: {allowed}")

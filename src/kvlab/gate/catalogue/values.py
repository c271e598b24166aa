"""One value held to its column: taken as it is, or refused with a reason. Nothing is rounded, trimmed or guessed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kvlab.core.errors import UserError, suggestion
from kvlab.gate.catalogue.columns import MOST_CHARACTERS, MOST_EXACT, MOST_WHOLE, RowColumn
from kvlab.gate.reasons import Reason

Value = str | int | float | bool | None

# Besides control characters: line separators, which break a line of a report, marks that turn the direction of
# writing, which let a text read other than it is, and what is not seen at all, which lets two texts read alike.
CONTROL = (
    r"[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ud800-\udfff]"
)
OUTER_SPACE = r"^\s|\s$"

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LOGICAL = {"true": True, "false": False}
_KINDS = {str: "a text", int: "a whole number of at most 63 bits", float: "a number", bool: "true or false"}
_SHOWN = 60  # characters of a refused value
_LISTED = 5  # reasons in one line


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


def checked(column: RowColumn, value: object) -> Value | Reason:
    """The value as a row holds it, or the reason why a row cannot hold it.

    None and the empty text say nothing and are None. A whole number is a number too; nothing else changes its kind.
    """
    if value is None or (isinstance(value, str) and not value):
        return None
    if column.kind is float and type(value) is int:
        if abs(value) > MOST_EXACT:
            return _refused("value_out_of_range", column, value, f"a number; whole ones up to {MOST_EXACT}")
        return _number(column, float(value))
    if not isinstance(value, column.kind) or (column.kind is not bool and isinstance(value, bool)):
        return _refused("value_kind", column, value, _allowed(column))
    if column.kind is str:
        return _text(column, value)
    return value if column.kind is bool else _number(column, value)


def parsed(column: RowColumn, text: str) -> Value | Reason:
    """What a text from the environment or the command line stands for, or why it stands for nothing."""
    if text == "" or column.kind is str:
        return checked(column, text)
    if column.kind is bool:
        return checked(column, _LOGICAL.get(text, text))
    if _NUMBER.fullmatch(text) is None:
        spelt = text.lower().lstrip("+-") in ("nan", "inf", "infinity")
        return _refused("value_not_finite" if spelt else "value_not_a_number", column, text, _allowed(column))
    if column.kind is float:
        return checked(column, float(text))
    if _WHOLE.fullmatch(text) is None:
        return _refused("value_not_whole", column, text, _allowed(column))
    if len(text) > _SHOWN:  # far too large, and the parser of whole numbers has a limit of its own
        return _refused("value_out_of_range", column, text, _allowed(column))
    return checked(column, int(text))


def bounds(column: RowColumn) -> tuple[float | None, float | None]:
    """Inclusive bounds of a number; a whole one fits a database's column anyway."""
    if column.kind is not int:
        return column.low, column.high
    return -MOST_WHOLE if column.low is None else column.low, MOST_WHOLE if column.high is None else column.high


def _number(column: RowColumn, value: float) -> Value | Reason:
    if isinstance(value, float) and not math.isfinite(value):
        return _refused("value_not_finite", column, value, _allowed(column))
    low, high = bounds(column)
    if (low is not None and value < low) or (high is not None and value > high):
        return _refused("value_out_of_range", column, value, _allowed(column))
    return column.kind(value)


def _text(column: RowColumn, value: str) -> Value | Reason:
    if len(value) > MOST_CHARACTERS:
        return _refused("value_too_long", column, value, f"at most {MOST_CHARACTERS} characters")
    if re.search(CONTROL, value):
        return _refused("value_control_character", column, value, "one line without control characters")
    if column.choices and not set(value.split("+") if column.joined else (value,)) <= set(column.choices):
        hint = suggestion(value.strip().lower(), column.choices)
        return _refused("value_unknown_word", column, value, _allowed(column) + hint)
    if re.search(OUTER_SPACE, value):
        return _refused("value_outer_space", column, value, f"{shown(value.strip())} without the space around it")
    return value


def _allowed(column: RowColumn) -> str:
    if column.choices:
        return ", ".join(column.choices) + (", or several joined by +" if column.joined else "")
    told = [_KINDS[column.kind]]
    told += [f"{word} {end}" for word, end in (("from", column.low), ("to", column.high)) if end is not None]
    return " ".join(told) + (f" ({column.unit})" if column.unit else "")


def _refused(code: str, column: RowColumn, value: object, allowed: str) -> Reason:
    return Reason(code=code, field=column.name, said=f"is {shown(value)}; allowed: {allowed}")

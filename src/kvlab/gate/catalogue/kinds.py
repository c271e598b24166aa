"""What a field of a row can hold: a whole number, a text of one line, words of a vocabulary joined by +."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

MOST_CHARACTERS = 4096
MOST_WHOLE = 2**63 - 1  # what a database column of whole numbers holds
MOST_EXACT = 2**53  # up to here a float holds every whole number

# Besides control characters: line separators, which break a line of a report, marks that turn the direction of
# writing, which let a text read other than it is, and what is not seen at all, which lets two texts read alike.
CONTROL = (
    r"[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ud800-\udfff]"
)
OUTER_SPACE = r"^\s|\s$"


def _one_line(text: str) -> str:
    if re.search(CONTROL, text):
        raise PydanticCustomError("value_control_character", "a control character")
    if re.search(OUTER_SPACE, text):
        raise PydanticCustomError("value_outer_space", "a space at an end")
    return text


@dataclass(frozen=True)
class Joined:
    """Of a text: one of `words`, or several joined by ``+``."""

    words: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source, handler):
        word = f"({'|'.join(self.words)})"
        return core_schema.str_schema(strict=True, pattern=rf"^{word}(\+{word})*$")


Text = Annotated[
    str,
    Field(max_length=MOST_CHARACTERS),
    AfterValidator(_one_line),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": MOST_CHARACTERS,
            "not": {"type": "string", "pattern": f"{OUTER_SPACE}|{CONTROL}"},
        }
    ),
]
Whole = Annotated[int, Field(ge=-MOST_WHOLE, le=MOST_WHOLE)]

"""Values for every column: one that is found again anywhere, and strategies for all that a column takes."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from kvlab.gate.catalogue.columns import COLUMNS, RowColumn
from kvlab.gate.catalogue.kinds import CONTROL, MOST_WHOLE

WORDS = {
    "mechanism": "kv_quantization",
    "compression_scope": "attention",
    "quality_eval_status": "failed",
    "support_status": "gated",
    "stored_span": "window",
}


def sentinel(column: RowColumn):
    """A value of this column that no other column's sentinel equals."""
    number = COLUMNS.index(column)
    if column.choices:
        return WORDS[column.name]
    return {str: f"sentinel-{column.name}", int: 7000 + number, float: (number + 1) / 128}[column.kind]


def plain_text():
    letters = st.characters(exclude_categories=("Cs", "Cc"))
    return st.text(letters, min_size=1, max_size=20).filter(
        lambda text: text.strip() == text and not re.search(CONTROL, text)
    )


def value_of(column: RowColumn):
    """Strategy of everything that the column takes, but for null and the empty text."""
    if column.choices:
        return st.sampled_from(column.choices)
    if column.kind is str:
        return plain_text()
    if column.kind is int:
        return st.integers(-MOST_WHOLE if column.low is None else int(column.low), MOST_WHOLE)
    return st.floats(column.low, column.high, allow_nan=False, allow_infinity=False)


def fields_of(columns):
    """Strategy of mappings that hold some of the columns, some of them null."""
    return st.fixed_dictionaries({}, optional={c.name: st.none() | value_of(c) for c in columns})

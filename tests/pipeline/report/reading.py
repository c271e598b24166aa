"""What a report says and what metrics hold, taken apart."""

from __future__ import annotations

import re


def tables_of(text: str) -> list[list[list[str]]]:
    """All Markdown tables of a text as lists of rows of cells."""
    found, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif block:
            found.append(block)
            block = []
    return found


def estimates_in(data) -> list[dict]:
    """Every Estimate in metrics or a part of them."""
    if isinstance(data, dict):
        return [data] if "low" in data and "value" in data else estimates_in(list(data.values()))
    return [found for item in data for found in estimates_in(item)] if isinstance(data, list) else []

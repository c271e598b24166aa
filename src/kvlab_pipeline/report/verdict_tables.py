"""Tables of ``verdict.json``."""

from __future__ import annotations

from kvlab.output import format as fmt
from kvlab_pipeline.studies.cells.tables import name


def verdicts(rows: list[dict]) -> str:
    """The words, what they rest on, and what would settle an open one."""
    lines = [
        [
            *name(row)[:2],
            f"`{row['engine']}`",
            f"`{row['dtype']}`",
            name(row)[2],
            f"**{row['verdict']}**",
            fmt.whole(row["windows_needed"]),
            "; ".join(row["reasons"]) or fmt.DASH,
        ]
        for row in rows
    ]
    headers = ["cell", "protocol", "engine", "dtype", "`variance_ratio`", "verdict", "windows needed", "reasons"]
    return fmt.table(headers, lines)


def preconditions(rows: list[dict]) -> str:
    """What had to hold before any number was worth a verdict."""
    lines = [[row["name"], "yes" if row["holds"] else "**no**", row["detail"] or fmt.DASH] for row in rows]
    return fmt.table(["condition", "holds", "detail"], lines)

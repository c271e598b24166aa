"""Each rung beside the best of another codec that stores no more, and `klt` less a part beside the whole."""

from __future__ import annotations

from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.ladder.tables import TEXTS, plain_rows


def claims(metrics: dict) -> list[dict]:
    """One claim for each rung over the coded clean cache that has a rival, and for each part that is taken out."""
    rows = [row for row in plain_rows(metrics) if row["difference"]]
    ablated = metrics.get("ladder_ablation") or []
    return [
        *(claim("ladder", subject(row, row["rival"]), row["difference"], row["compared"]) for row in rows),
        *(claim("ladder", subject(row, row["against"]), row["difference"], row["compared"]) for row in ablated),
    ]


def subject(row: dict, other: str) -> str:
    """A rung in place of another, and on which text."""
    return f"`{row['label']}` in place of `{other}` ({TEXTS[row['text']]})"

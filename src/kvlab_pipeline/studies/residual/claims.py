"""Whether the codec errs more on one engine's capture, from the part ``residual`` of ``metrics.json``."""

from __future__ import annotations

from kvlab_pipeline.studies.counterparts import LEVELS
from kvlab_pipeline.studies.estimates import claim


def claims(residual: dict) -> list[dict]:
    """One claim a ratio and stream, over the layers that the studied recipe codes.

    The cells that such a claim compares are the two captures, by the names of their results.
    """
    pooled = [row for row in residual.get("ratios") or [] if row["layer"] is None and row["ratio"]]
    widest = "coded" if any(row["group"] == "coded" for row in pooled) else "all"
    return [between_engines(row) for row in pooled if row["group"] == widest]


def between_engines(row: dict) -> dict:
    """One of them; it counts as resolved only when the row does."""
    low, high = LEVELS["engine"]
    subject = (
        f"Coding {row['stream'].upper()} of `{high}` in place of `{low}`, `variance_ratio`"
        f" `{row['variance_ratio']:g}`, {row['measure']}:"
    )
    captures = [[{"cell_id": f"residual/{engine}", "engine": engine}] for engine in (high, low)]
    how = {"up": "the squared error rises", "down": "the squared error falls", "null": 1.0, "unit": "times"}
    return claim("residual", subject, row["ratio"], captures, **how) | {
        "borne_out": row["resolved"],
        "objection": "the signs of the windows do not bear it out",
    }

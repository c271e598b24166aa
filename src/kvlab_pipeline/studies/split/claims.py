"""Whether K or V deserves more of the bits, from the part ``split`` of ``metrics.json``."""

from __future__ import annotations

from kvlab_pipeline.studies.estimates import claim


def claims(rows: list[dict]) -> list[dict]:
    """One claim for each division beside the most even one."""
    return [claim("split", subject(row), row["difference"], row["compared"]) for row in rows if row["difference"]]


def subject(row: dict) -> str:
    """A division in words."""
    division = f"K at {row['k_bits']} and V at {row['v_bits']} bits"
    return f"`{row['codec']}` with {division} in place of the even division (`{row['engine']}`)"

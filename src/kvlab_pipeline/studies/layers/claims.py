"""Whether the costs of layers and of streams add up, from the part ``additivity`` of ``metrics.json``."""

from __future__ import annotations

from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.layers.tables import NAMES


def claims(additivity: list[dict]) -> list[dict]:
    """Whether layers add up, stream by stream, and whether K and V do, under every engine and protocol."""
    return [found for row in additivity if (found := (together if row["parts"] == "streams" else compounding)(row))]


def together(row: dict) -> dict:
    """The claim that coding K and V together costs, or does not, what either costs alone."""
    return claim(
        "layers",
        f"Coding K and V together in all layers {place(row)}",
        row["interaction"],
        row["compared"],
        up="raises KL beyond the sum of either alone",
        down="keeps KL below the sum of either alone",
    )


def compounding(row: dict) -> dict | None:
    """The claim that the cost of all layers is, or is not, the sum of the layers' own; None without a ratio to say."""
    several = len(row["compared"][1]) > 1
    if not row["ratio"] or not several:
        return None
    subject = f"Coding {NAMES[row['stream']]} in all layers {place(row)}"
    unit = "times the sum of its layers coded alone"
    how = {"up": "raises KL", "down": "raises KL only", "null": 1.0, "unit": unit}
    return claim("layers", subject, row["ratio"], row["compared"], **how)


def place(row: dict) -> str:
    """Where a row was measured."""
    return f"(`{row['engine']}`, `{row['protocol']}`)"

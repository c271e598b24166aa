"""Whether roundings cost what the curves predict, and whether an error's direction matters, from ``metrics.json``."""

from __future__ import annotations

from kvlab_pipeline.studies.estimates import claim


def claims(closure: list[dict], structure: list[dict]) -> list[dict]:
    """One claim for each rounding that the curves predict, and one for each cell of the codec with its control."""
    casts = [rounded(row) for row in closure if row["against"] == "cast"]
    return casts + [turned(row) for row in structure if row["ratio"]]


def rounded(row: dict) -> dict:
    """The claim that a rounding costs what the noise curve predicts, or does not."""
    subject = f"Rounding {words(row['stream'])} to {row['dtype']} (`{row['engine']}`)"
    unit = "times what the noise curve predicts"
    how = {"up": "brings KL", "down": "brings KL only", "null": 1.0, "unit": unit}
    return claim("noise", subject, row["ratio"], row["compared"], **how)


def turned(row: dict) -> dict:
    """The claim that the direction of the codec's error matters, or does not."""
    subject = f"The studied codec's error on {words(row['stream'])} (`{row['engine']}`)"
    unit = "times what an error of the same size and random direction costs"
    return claim("noise", subject, row["ratio"], row["compared"], null=1.0, unit=unit)


def words(stream: str) -> str:
    """A stream in words."""
    return " and ".join(stream.upper())

"""A claim: one sentence's worth of result, which cannot be had without its interval and the cells it compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvlab.errors import Fault
from kvlab.report.gather import Measured
from kvlab.stats.bootstrap import Estimate
from kvlab.stats.power import windows_for_sign

UNIT = "nats per token"


def claim(
    about: str,
    subject: str,
    effect: Estimate,
    compared: Sequence[Measured | Sequence[Measured]],
    *,
    up: str = "raises KL",
    down: str = "lowers KL",
    null: float = 0.0,
    unit: str = UNIT,
) -> dict:
    """What `report.claims.sentence` makes a sentence of.

    Parameters
    ----------
    about : str
        The study, by the name of its section.
    subject : str
        What is said to do something, in words that start a sentence; Markdown code spans are allowed.
    effect : Estimate
        How large, with its interval.
    compared : two of Measured, or of a list of Measured that are added up
        What is set against what; the first is the one that the subject names.
    up, down : str
        What it is said to do when the effect is clearly above `null`, and when it is clearly below.
    null : float
        The effect that is no effect: 0 for differences, 1 for ratios.
    unit : str
        Of the effect; empty for a ratio.

    Raises
    ------
    Fault
        When not two things are compared, or one of them is empty.
    """
    sides = [[side] if isinstance(side, Measured) else list(side) for side in compared]
    named = [[reference(measured) for measured in side] for side in sides]
    words = {"about": about, "subject": subject, "up": up, "down": down, "null": null, "unit": unit}
    return stated(words, effect, named)


def stated(words: dict, effect: Estimate, compared: list[list[dict]]) -> dict:
    """A claim whose sides are references already; `words` are those of `claim`."""
    if len(compared) != 2 or not all(compared):
        raise Fault(f"a claim compares two things, not {[len(side) for side in compared]} ({words['subject']})")
    ends = {end: getattr(effect, end) - words["null"] for end in ("value", "low", "high")}
    needed = windows_for_sign(replace(effect, **ends))
    return words | {"effect": effect.to_json(), "windows_needed": needed, "compared": compared}


def reference(measured: Measured) -> dict:
    """A cell's id, where it was measured, and what it stores if it stores anything."""
    cell = measured.cell
    keys = ("study", "label", "engine", "dtype", "protocol", "stream")
    found = {"cell_id": measured.record.cell_id} | {key: getattr(cell, key) for key in keys}
    stored = measured.record.coding.bits_per_value if measured.role == "codec" else None
    return found | {"bits_per_value": stored}

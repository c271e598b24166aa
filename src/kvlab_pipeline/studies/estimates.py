"""A claim: one sentence's worth of result, made of an entry of ``metrics.json`` and of nothing else.

An entry that compares cells names them under ``compared``; `sides` writes that, and `claim` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Estimate
from kvlab.stats.power import windows_for_sign
from kvlab_pipeline.studies.measured import Measured

UNIT = "nats per token"
ENDS = ("value", "low", "high")


def claim(
    about: str,
    subject: str,
    effect: dict,
    compared: Sequence[Sequence[dict]],
    *,
    up: str = "raises KL",
    down: str = "lowers KL",
    null: float = 0.0,
    unit: str = UNIT,
    of_engine: bool | None = None,
) -> dict:
    """What `report.claims.sentence` makes a sentence of.

    Parameters
    ----------
    about : str
        The study, by the name of its section.
    subject : str
        What is said to do something, in words that start a sentence; Markdown code spans are allowed.
    effect : dict
        How large, with its interval (``Estimate.to_json``).
    compared : two sequences of dict
        What is set against what, by `sides`; the first is the one that the subject names.
    up, down : str
        What it is said to do when the effect is clearly above `null`, and when it is clearly below.
    null : float
        The effect that is no effect: 0 for differences, 1 for ratios.
    unit : str
        Of the effect; empty for a ratio.
    of_engine : bool, optional
        Whether the effect is laid to the engine; by default where the two sides are of other engines.

    Raises
    ------
    Fault
        When not two things are compared, or one of them is empty.
    """
    if len(compared) != 2 or not all(compared):
        raise Fault(
            f"a claim compares two things, not {[len(side) for side in compared]} ({subject})", code="fault.two-sides"
        )
    if of_engine is None:
        of_engine = engines_of(compared[0]) != engines_of(compared[1])
    words = {"about": about, "subject": subject, "up": up, "down": down, "null": null, "unit": unit}
    words["of_engine"] = of_engine
    return words | {"effect": effect, "windows_needed": windows_to_settle(effect, null), "compared": compared}


def windows_to_settle(effect: dict, null: float) -> int | None:
    """Windows that would show an effect of this size beside `null` with a power of 80 %; None when none is seen."""
    given = Estimate(**effect)
    return windows_for_sign(replace(given, **{end: getattr(given, end) - null for end in ENDS}))


def engines_of(side: Sequence[dict]) -> set[str | None]:
    """The engines that the cells of a side were measured on."""
    return {cell.get("engine") for cell in side}


def sides(*compared: Measured | Sequence[Measured]) -> list[list[dict]]:
    """What an entry compares with what, cell by cell, as JSON; cells in one side are added up."""
    return [[reference(measured) for measured in ([side] if isinstance(side, Measured) else side)] for side in compared]


def reference(measured: Measured) -> dict:
    """A cell's id, where it was measured, and what it stores if it stores anything."""
    cell = measured.cell
    keys = ("study", "label", "engine", "dtype", "protocol", "stream")
    found = {"cell_id": measured.record.cell_id} | {key: getattr(cell, key) for key in keys}
    stored = measured.record.coding.bits_per_value if measured.role == "codec" else None
    return found | {"bits_per_value": stored}

"""The decomposition in the report: the published gap, and all factors at once."""

from __future__ import annotations

from kvlab_pipeline.studies.chapter import Chapter, Drawn, Measured, Section
from kvlab_pipeline.studies.factors.claims import claims
from kvlab_pipeline.studies.factors.figure import gap_shapley, gap_shapley_table
from kvlab_pipeline.studies.factors.numbers import factors_entry, gap_entry, text_entries
from kvlab_pipeline.studies.factors.schema import Decomposition, Gap, OnText
from kvlab_pipeline.studies.factors.tables import context

PARTS = {"gap": "of the gap", "factors": "over all factors"}


def entries(measured: Measured) -> dict:
    """Its parts of ``metrics.json``."""
    given = (measured.params, measured.results, measured.boot)
    return {
        "gap": gap_entry(*given),
        "gap_by_text": text_entries(*given),
        "factors": factors_entry(*given),
    }


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The shares and the interactions, measure by measure."""
    found = []
    for part, where in PARTS.items():
        for name, measure in ((metrics.get(part) or {}).get("measures") or {}).items():
            found.append((f"shares {where}, `{name}`", [row["share"] for row in measure["parts"]]))
            found.append((f"interactions {where}, `{name}`", [row["effect"] for row in measure["interactions"]]))
    return found


CHAPTER = Chapter(
    parts={"gap": Gap, "gap_by_text": tuple[OnText, ...], "factors": Decomposition},
    entries=entries,
    sections={
        "gap": Section(10, "Shares of every factor, corners and interactions", asks="the published gap and its shares"),
        "factors": Section(
            20,
            "The same over all factors, number formats and calibrations included",
            asks="every factor at once",
        ),
    },
    context=context,
    claims=lambda metrics: [claim for part in PARTS for claim in claims(metrics.get(part), part)],
    figures={"gap_shapley": Drawn(gap_shapley_table, gap_shapley)},
    limits=limits,
)

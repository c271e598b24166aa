"""Ways to spend bytes in the report."""

from __future__ import annotations

from kvlab_pipeline.pages.basis import Basis
from kvlab_pipeline.studies.chapter import Chapter, Drawn, Measured, Section
from kvlab_pipeline.studies.mitigations import tables
from kvlab_pipeline.studies.mitigations.claims import claims
from kvlab_pipeline.studies.mitigations.figure import mitigations, mitigations_table
from kvlab_pipeline.studies.mitigations.numbers import mitigation_entries
from kvlab_pipeline.studies.mitigations.plan import read_choice
from kvlab_pipeline.studies.mitigations.schema import Mitigations


def entries(measured: Measured) -> dict:
    """Its part of ``metrics.json``."""
    choice = read_choice(measured.sources.choice)
    return {"mitigations": mitigation_entries(measured.params, measured.results, measured.boot, choice)}


def context(metrics: dict, basis: Basis) -> dict:
    """What ``mitigations.md.j2`` names."""
    return {"mitigations": tables.mitigations_context(metrics, basis)}


def claimed(metrics: dict) -> list[dict]:
    """One claim for each way to spend that is another cell than its rival."""
    left_uncoded = (metrics.get("settings") or {}).get("codec", {}).get("boundary_layers", ())
    return claims(metrics.get("mitigations"), len(left_uncoded))


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of favouring layers."""
    compared = (metrics.get("mitigations") or {}).get("comparisons") or []
    return [("ways to spend bytes, KL", [row["difference"] for row in compared if not row["same"]])]


CHAPTER = Chapter(
    parts={"mitigations": Mitigations},
    entries=entries,
    sections={"mitigations": Section(100, "Where bytes are best spent", asks="ways to spend bytes")},
    context=context,
    claims=claimed,
    figures={"mitigations": Drawn(mitigations_table, mitigations)},
    limits=limits,
)

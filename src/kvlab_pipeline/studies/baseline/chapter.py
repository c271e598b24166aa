"""The engine baseline in the report: the engines without a codec, and whether they may be compared."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvlab_pipeline.studies.baseline.claims import claims
from kvlab_pipeline.studies.baseline.figure import baseline, baseline_table
from kvlab_pipeline.studies.baseline.numbers import agreement_entry, baseline_entry, floor_entry, peer_entries
from kvlab_pipeline.studies.baseline.schema import Agreement, BaselineEntry, Floor, PeerEntry
from kvlab_pipeline.studies.baseline.tables import context
from kvlab_pipeline.studies.chapter import Chapter, Drawn, Measured, Section, estimates_of


def entries(measured: Measured) -> dict:
    """Its parts of ``metrics.json``."""
    params, results, boot = measured.params, measured.results, measured.boot
    agreement, why = agreement_entry(params, results, boot)
    return {
        "floor": {engine: floor_entry(params, results, boot, engine) for engine in params.engines},
        "baseline": [baseline_entry(results, boot, run) for run in results.runs],
        "baseline_peers": peer_entries(params, results, boot),
        "agreement": agreement,
        "agreement_why": why,
    }


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of engines."""
    return [
        ("engines without a codec, KL", estimates_of(metrics, "baseline", "kl")),
        ("engines against each other, KL", estimates_of(metrics, "baseline_peers", "kl")),
    ]


CHAPTER = Chapter(
    parts={
        "floor": Floor,
        "baseline": tuple[BaselineEntry, ...],
        "baseline_peers": tuple[PeerEntry, ...],
        "agreement": Annotated[
            Agreement | None,
            Field(description="Null where only one engine was measured; `agreement_why` then says so."),
        ],
        "agreement_why": tuple[str, ...],
    },
    entries=entries,
    sections={
        "baseline": Section(40, "Each engine and number format against the float32 truth"),
        "agreement": Section(
            50, "Whether numbers of two engines may stand side by side", asks="the engines against each other"
        ),
    },
    context=context,
    claims=lambda metrics: claims(metrics.get("agreement")),
    figures={"baseline": Drawn(baseline_table, baseline)},
    limits=limits,
)

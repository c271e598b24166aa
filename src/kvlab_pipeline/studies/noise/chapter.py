"""Plain noise in the report: how KL grows with an error, what rounding costs, whether direction matters."""

from __future__ import annotations

from kvlab_pipeline.studies.chapter import Chapter, Drawn, Measured, Section, estimates_of
from kvlab_pipeline.studies.noise.claims import claims
from kvlab_pipeline.studies.noise.figure import noise, noise_table
from kvlab_pipeline.studies.noise.numbers import closure_entries, noise_entries, noise_slope_entries, structure_entries
from kvlab_pipeline.studies.noise.schema import ClosureEntry, NoiseEntry, SlopeEntry, StructureEntry
from kvlab_pipeline.studies.noise.tables import context


def entries(measured: Measured) -> dict:
    """Its parts of ``metrics.json``."""
    given = (measured.params, measured.results, measured.boot)
    return {
        "noise": noise_entries(*given),
        "noise_slope": noise_slope_entries(*given),
        "closure": closure_entries(*given),
        "structure": structure_entries(*given),
    }


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of noise."""
    return [
        ("noise, KL", estimates_of(metrics, "noise", "kl")),
        ("noise, slope", estimates_of(metrics, "noise_slope", "slope")),
    ]


CHAPTER = Chapter(
    parts={
        "noise": tuple[NoiseEntry, ...],
        "noise_slope": tuple[SlopeEntry, ...],
        "closure": tuple[ClosureEntry, ...],
        "structure": tuple[StructureEntry, ...],
    },
    entries=entries,
    sections={
        "noise": Section(
            80, "How KL grows with an error, and what rounding costs", asks="rounding and the direction of the error"
        )
    },
    context=lambda metrics, basis: {"noise": context(metrics, basis)},
    claims=lambda metrics: claims(metrics.get("closure") or [], metrics.get("structure") or []),
    figures={"noise": Drawn(noise_table, noise)},
    limits=limits,
)

"""The codec's own error in the report, without a model."""

from __future__ import annotations

from kvlab_pipeline.pages.basis import METHODS, Basis
from kvlab_pipeline.pages.withheld import undecided
from kvlab_pipeline.studies.chapter import Chapter, Drawn, Measured, Section
from kvlab_pipeline.studies.residual import tables
from kvlab_pipeline.studies.residual.claims import claims
from kvlab_pipeline.studies.residual.figure import d_eff, d_eff_table, residual, residual_table
from kvlab_pipeline.studies.residual.numbers import residual_entries
from kvlab_pipeline.studies.residual.schema import Residual


def entries(measured: Measured) -> dict:
    """Its part of ``metrics.json``."""
    paths, provenance = measured.sources.residual, measured.results.provenance
    return {"residual": residual_entries(measured.params, paths, provenance, measured.boot)}


def context(metrics: dict, basis: Basis) -> dict:
    """What ``residual.md.j2`` names."""
    return {
        "residual": tables.context(metrics.get("residual"), basis.confidence, METHODS, undecided(metrics) is not None)
    }


CHAPTER = Chapter(
    parts={"residual": Residual},
    entries=entries,
    sections={
        "residual": Section(
            90, "Error, rank and bytes by layer, without a model", asks="the codec's error on each engine's capture"
        )
    },
    context=context,
    claims=lambda metrics: claims(metrics.get("residual") or {}),
    figures={"residual": Drawn(residual_table, residual), "d_eff": Drawn(d_eff_table, d_eff)},
)

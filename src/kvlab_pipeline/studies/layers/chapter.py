"""The layers in the report: what each costs, and whether they add up."""

from __future__ import annotations

from kvlab_pipeline.studies.chapter import Chapter, Drawn, Measured, Section, estimates_of
from kvlab_pipeline.studies.layers.claims import claims
from kvlab_pipeline.studies.layers.figure import layers, layers_table
from kvlab_pipeline.studies.layers.numbers import additivity_entries, layer_entries
from kvlab_pipeline.studies.layers.schema import AdditivityEntry, LayerEntry
from kvlab_pipeline.studies.layers.tables import context


def entries(measured: Measured) -> dict:
    """Its parts of ``metrics.json``."""
    given = (measured.params, measured.results, measured.boot)
    return {"layers": layer_entries(*given), "additivity": additivity_entries(*given)}


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of layers."""
    return [
        ("layers alone and left out, KL", estimates_of(metrics, "layers", "kl")),
        ("layers together minus sum, KL", estimates_of(metrics, "additivity", "interaction")),
    ]


CHAPTER = Chapter(
    parts={"layers": tuple[LayerEntry, ...], "additivity": tuple[AdditivityEntry, ...]},
    entries=entries,
    sections={
        "layers": Section(70, "What each layer costs alone and on top of the others", asks="whether layers add up")
    },
    context=lambda metrics, basis: {"layers": context(metrics, basis)},
    claims=lambda metrics: claims(metrics.get("additivity") or []),
    figures={"layers": Drawn(layers_table, layers)},
    limits=limits,
)

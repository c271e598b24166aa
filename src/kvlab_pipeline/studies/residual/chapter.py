"""The codec's own error in the report, without a model."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.basis import METHODS, Basis
from kvlab_pipeline.rendering.figure import (
    GREY,
    Figure,
    LegendKey,
    Look,
    Panel,
    beside,
    colour_of,
    linear_axis,
    log_axis,
    shape_of,
    whole_axis,
)
from kvlab_pipeline.rendering.withheld import undecided
from kvlab_pipeline.studies.baselines import LEVELS
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.residual import tables
from kvlab_pipeline.studies.residual.numbers import residual_entries
from kvlab_pipeline.studies.tidy import (
    BITS,
    BYTES,
    COUNT,
    PROBABILITY,
    RATIO,
    SHARE,
    WINDOWS,
    By,
    Estimand,
    Level,
    Several,
    Single,
)

# The codec's own error on each engine's capture, by layer and by group of layers, and the engines' beside one another.
PLACE = {
    "variance_ratio": Level(),
    "stream": Level(),
    "group": Level("layer, coded (all but the boundary layers) or all"),
    "layer": Level("null for a group of layers"),
    "boundary": Level(),
}
RESIDUAL = Single(
    {
        "rows": Several(
            {"engine": Level(), "recipe_id": Level()}
            | PLACE
            | {
                "raw_error": Estimand(RATIO, "squared error over the squared deviation from the heads' means"),
                "whitened_error": Estimand(RATIO, "the same, weighed by Sigma_q; null for V"),
                "d_eff": Estimand(COUNT, "kept rank"),
                "outlier_rate": Estimand(SHARE),
                "bits_per_value": Estimand(BITS),
                "frame_bytes": Estimand(BYTES, "of a window"),
                "d_eff_blocks": By("rank", Estimand(COUNT, "blocks that kept this rank")),
                "d_eff_shares": Several({"d_eff": Level(), "blocks": Estimand(COUNT), "share": Estimand(SHARE)}),
            }
        ),
        "ratios": Several(
            PLACE
            | {
                "measure": Level("of the error: raw or whitened"),
                "ratio": Estimand(RATIO, "the squared error on vLLM's capture over that on transformers', by window"),
                "p_value": Estimand(PROBABILITY),
                "q_value": Estimand(PROBABILITY),
                "resolved": Level("whether interval and q-value, of a group the p-value, both say so"),
                "windows_needed": Estimand(WINDOWS),
            }
        ),
    }
)


# The codec's own error layer by layer, and how many directions its blocks keep, on each engine's capture.


def residual_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, variance ratio, stream and layer: the error as attention weighs it, relative.

    `measure` is ``whitened`` for K and ``raw`` for V, which has no other.
    """
    rows = []
    for row in (metrics.get("residual") or {}).get("rows") or []:
        if row["layer"] is not None:
            measure = "whitened" if row["whitened_error"] else "raw"
            place = {key: row[key] for key in ("engine", "variance_ratio", "stream", "layer", "boundary")}
            rows.append(place | {"measure": measure} | marks.interval(row[f"{measure}_error"]))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def residual(table: pl.DataFrame) -> Figure:
    """Relative squared error by layer on a logarithmic axis, a panel per stream; open marks: boundary layers."""
    lines = marks.numbered(table)
    streams, engines, ratios = marks.each(lines, "stream", "engine", "variance_ratio")
    places, values = whole_axis(table["layer"], "layer"), log_axis(lines, "squared error, relative")

    def dot(line: dict):
        at = line["layer"] + beside(engines.index(line["engine"]), len(engines), 0.5)
        shape = shape_of(ratios.index(line["variance_ratio"]))
        return marks.mark(line, at, error_words(line), Look(colour_of(line["engine"]), shape, open=line["boundary"]))

    panels = []
    for stream in streams:
        mine = [line for line in lines if line["stream"] == stream]
        panels.append(Panel(places, values, tuple(map(dot, mine)), title=f"{stream.upper()}, {mine[0]['measure']}"))
    return Figure(
        "The codec's own error on each engine's K and V",
        "Squared error over the squared deviation from the heads' means; errors of K are weighed by Sigma_q. "
        "An open mark is a boundary layer. The axis is logarithmic.",
        tuple(panels),
        columns=len(streams),
        keys=tuple(keys(engines, ratios, lambda order: Look(GREY, shape_of(order)))),
        height=210,
    )


def keys(engines: list[str], ratios: list[float], look: Callable[[int], Look]) -> list[LegendKey]:
    """The legend: engines by colour, and the variance ratios, if there are several, by `look` of their place."""
    found = [LegendKey(engine, Look(colour_of(engine))) for engine in engines] if len(engines) > 1 else []
    if len(ratios) > 1:
        found += [LegendKey(f"variance_ratio {fmt.plain(ratio)}", look(order)) for order, ratio in enumerate(ratios)]
    return found


def error_words(line: dict) -> list[str]:
    """What a layer's mark says."""
    boundary = ["boundary layer"] if line["boundary"] else []
    return [
        f"{line['stream'].upper()} of layer {fmt.number(line['layer'])}, {line['engine']}",
        f"variance_ratio {fmt.plain(line['variance_ratio'])}",
        marks.quantity(f"relative squared error, {line['measure']},", line, unit=""),
        *boundary,
        marks.basis(line, "coded"),
    ]


def d_eff_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, variance ratio, stream and kept rank: blocks of all layers, and their share of all."""
    rows = []
    for row in (metrics.get("residual") or {}).get("rows") or []:
        place = {key: row[key] for key in ("engine", "variance_ratio", "stream")}
        for share in row["d_eff_shares"] or []:
            rows.append(place | {key: share[key] for key in ("d_eff", "blocks")} | marks.interval(share["share"]))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def d_eff(table: pl.DataFrame) -> Figure:
    """Share of blocks by kept rank: a panel per stream, a colour per engine, open bars for later variance ratios."""
    lines = marks.numbered(table)
    streams, engines, ratios = marks.each(lines, "stream", "engine", "variance_ratio")
    places = whole_axis(table["d_eff"], "kept rank (d_eff)")
    values = linear_axis(table["high"], "share of all blocks", form="percent")

    def bar(line: dict):
        at = line["d_eff"] + beside(engines.index(line["engine"]), len(engines), 0.8)
        look = Look(colour_of(line["engine"]), open=ratios.index(line["variance_ratio"]) > 0)
        return marks.mark(line, at, rank_words(line), look, bar=0.8 / len(engines))

    panels = [
        Panel(places, values, tuple(bar(line) for line in lines if line["stream"] == stream), title=stream.upper())
        for stream in streams
    ]
    return Figure(
        "How many directions the codec's blocks keep, all layers",
        "Blocks of all layers; thin lines are intervals.",
        tuple(panels),
        columns=len(streams),
        keys=tuple(keys(engines, ratios, lambda order: Look(GREY, "square", open=order > 0))),
    )


def rank_words(line: dict) -> list[str]:
    """What a bar says."""
    return [
        f"rank {fmt.number(line['d_eff'])} of {line['stream'].upper()}, {line['engine']}",
        f"variance_ratio {fmt.plain(line['variance_ratio'])}",
        marks.quantity("share of all blocks", line, unit=""),
        f"{fmt.number(line['blocks'])} blocks",
        marks.basis(line, "coded"),
    ]


# Whether the codec errs more on one engine's capture, from the part ``residual`` of ``metrics.json``.


def claims(residual: dict) -> list[dict]:
    """One claim a ratio and stream, over the layers that the studied recipe codes.

    The cells that such a claim compares are the two captures, by the names of their results.
    """
    pooled = [row for row in residual.get("ratios") or [] if row["layer"] is None and row["ratio"]]
    widest = "coded" if any(row["group"] == "coded" for row in pooled) else "all"
    return [between_engines(row) for row in pooled if row["group"] == widest]


def between_engines(row: dict) -> dict:
    """One of them; it counts as resolved only when the row does."""
    low, high = LEVELS["engine"]
    subject = (
        f"Coding {row['stream'].upper()} of `{high}` in place of `{low}`, `variance_ratio`"
        f" `{row['variance_ratio']:g}`, {row['measure']}:"
    )
    captures = [[{"cell_id": f"residual/{engine}", "engine": engine}] for engine in (high, low)]
    how = {"up": "the squared error rises", "down": "the squared error falls", "null": 1.0, "unit": "times"}
    return claim("residual", subject, row["ratio"], captures, **how) | {
        "borne_out": row["resolved"],
        "objection": "the signs of the windows do not bear it out",
    }


def entries(measured: ChapterInputs) -> dict:
    """Its part of ``metrics.json``."""
    paths, provenance = measured.sources.residual, measured.results.provenance
    return {"residual": residual_entries(measured.params, paths, provenance, measured.boot)}


def context(metrics: dict, basis: Basis) -> dict:
    """What ``residual.md.j2`` names."""
    return {
        "residual": tables.context(
            metrics.get("residual"),
            (metrics.get("identity") or {}).get("calibration_origin"),
            basis.confidence,
            METHODS,
            undecided(metrics) is not None,
        )
    }


CHAPTER = Chapter(
    parts={"residual": RESIDUAL},
    entries=entries,
    sections={
        "residual": PageSection(
            90, "Error, rank and bytes by layer, without a model", asks="the codec's error on each engine's capture"
        )
    },
    context=context,
    claims=lambda metrics: claims(metrics.get("residual") or {}),
    figures={"residual": Drawn(residual_table, residual), "d_eff": Drawn(d_eff_table, d_eff)},
)

"""The codec's own error layer by layer, and how many directions its blocks keep, on each engine's capture."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.pages import marks
from kvlab_pipeline.pages.figure import (
    GREY,
    Figure,
    Key,
    Look,
    Panel,
    beside,
    colour_of,
    linear_axis,
    log_axis,
    shape_of,
    whole_axis,
)


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


def keys(engines: list[str], ratios: list[float], look: Callable[[int], Look]) -> list[Key]:
    """The legend: engines by colour, and the variance ratios, if there are several, by `look` of their place."""
    found = [Key(engine, Look(colour_of(engine))) for engine in engines] if len(engines) > 1 else []
    if len(ratios) > 1:
        found += [Key(f"variance_ratio {fmt.plain(ratio)}", look(order)) for order, ratio in enumerate(ratios)]
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

"""The codec's own error layer by layer, and how many directions its blocks keep, on each engine's capture."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import GREY, PALE, canvas, colour_of, interval, legend, styled, title

SHAPES = "os^D"


def residual_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, variance ratio, stream and layer: the error as attention weighs it, relative.

    `measure` is ``whitened`` for K and ``raw`` for V, which has no other.
    """
    rows = []
    for row in (metrics.get("residual") or {}).get("rows") or []:
        if row["layer"] is not None:
            measure = "whitened" if row["whitened_error"] else "raw"
            place = {key: row[key] for key in ("engine", "variance_ratio", "stream", "layer", "boundary")}
            rows.append(place | {"measure": measure} | interval(row[f"{measure}_error"]))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def residual(table: pl.DataFrame):
    """Relative squared error by layer on a logarithmic axis, a panel per stream; open dots: boundary layers."""
    from matplotlib.ticker import MaxNLocator

    streams, engines, ratios = (list(dict.fromkeys(table[key])) for key in ("stream", "engine", "variance_ratio"))
    figure, axes = canvas(height=3.6, panels=len(streams))
    for axis, stream in zip(axes, streams, strict=True):
        lines = [line for line in table.to_dicts() if line["stream"] == stream]
        if any(line["value"] > 0 for line in lines):
            axis.set_yscale("log")
        for engine, ratio in ((engine, ratio) for engine in engines for ratio in ratios):
            chosen = [line for line in lines if (line["engine"], line["variance_ratio"]) == (engine, ratio)]
            residual_line(axis, chosen, engines.index(engine), len(engines), shape_of(ratios.index(ratio)))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
        axis.grid(axis="y", color=PALE, linewidth=0.5)
        axis.set_xlabel("layer")
        axis.margins(x=0.08)
        axis.set_title(
            f"{stream.upper()}, {lines[0]['measure']}", fontsize=9, fontweight="normal", color=GREY, loc="right"
        )
        legend(axis, engines)
    axes[0].set_ylabel("squared error, relative")
    ratio_legend(figure, ratios, shape_key)
    title(figure, "The codec's own error on each engine's K and V (open: boundary layers)")
    return figure


def residual_line(axis, lines: list[dict], order: int, engines: int, shape: str) -> None:
    """One engine at one variance ratio."""
    for line in lines:
        place, colour = line["layer"] + 0.24 * (order - (engines - 1) / 2), colour_of(line["engine"])
        low = line["low"] if line["low"] > 0 else line["value"]
        axis.plot([place, place], [low, line["high"]], color=colour, linewidth=1.4)
        axis.plot(
            place,
            line["value"],
            shape,
            color=colour,
            markersize=5.5,
            markeredgewidth=1.2,
            markerfacecolor="white" if line["boundary"] else colour,
        )


def ratio_legend(figure, ratios: list[float], mark: Callable) -> None:
    """Below the panels, which mark is which variance ratio; none when there is nothing to tell apart.

    `mark` takes a ratio's place in the list and its label and returns what the legend shows.
    """
    if len(ratios) < 2:
        return
    handles = [mark(order, f"variance_ratio {fmt.plain(ratio)}") for order, ratio in enumerate(ratios)]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(ratios), frameon=False, fontsize=8)


def shape_key(order: int, label: str):
    """A variance ratio's dot."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=GREY, marker=shape_of(order), linestyle="", label=label)


def shape_of(order: int) -> str:
    """A variance ratio's shape, by its place in the list."""
    return SHAPES[order % len(SHAPES)]


def d_eff_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, variance ratio, stream and kept rank: blocks of all layers, and their share of all."""
    rows = []
    for row in (metrics.get("residual") or {}).get("rows") or []:
        place = {key: row[key] for key in ("engine", "variance_ratio", "stream")}
        for share in row["d_eff_shares"] or []:
            rows.append(place | {key: share[key] for key in ("d_eff", "blocks")} | interval(share["share"]))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def d_eff(table: pl.DataFrame):
    """Share of blocks by kept rank: a panel per stream, a colour per engine, open bars for later variance ratios."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    streams, engines, ratios = (list(dict.fromkeys(table[key])) for key in ("stream", "engine", "variance_ratio"))
    figure, axes = canvas(height=3.2, panels=len(streams), share=True)
    width = 0.8 / len(engines)
    for axis, stream in zip(axes, streams, strict=True):
        for line in (line for line in table.to_dicts() if line["stream"] == stream):
            order, colour = engines.index(line["engine"]), colour_of(line["engine"])
            face = "white" if ratios.index(line["variance_ratio"]) else colour
            place = line["d_eff"] + width * (order - (len(engines) - 1) / 2)
            axis.bar(place, line["value"], width, facecolor=face, edgecolor=colour, linewidth=1)
            axis.plot([place, place], [line["low"], line["high"]], color=GREY, linewidth=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=" %"))
        axis.grid(axis="y", color=PALE, linewidth=0.5)
        axis.set_xlabel("kept rank (d_eff)")
        axis.set_title(stream.upper(), fontsize=9, fontweight="normal", color=GREY, loc="right")
        legend(axis, engines)
    axes[0].set_ylabel("share of all blocks")
    ratio_legend(figure, ratios, bar_key)
    title(figure, "How many directions the codec's blocks keep, all layers")
    return figure


def bar_key(order: int, label: str):
    """A variance ratio's bar."""
    from matplotlib.patches import Patch

    return Patch(facecolor="white" if order else GREY, edgecolor=GREY, label=label)

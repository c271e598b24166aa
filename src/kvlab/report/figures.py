"""The report's pictures: each is drawn from a small table that is saved beside it as CSV.

A figure is a pair of functions: one takes the table out of ``metrics.json``, the other draws exactly
that table, so the CSV and the picture cannot differ. The SVG holds its letters as paths (it looks the
same everywhere), no date, and fixed ids (a rerun is byte for byte the same).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl

from kvlab.errors import UnknownName
from kvlab.records import atomic
from kvlab.report import format as fmt

WIDTH = 7.3  # inches at 72 dpi; a browser shows the SVG about 700 px wide
# Okabe and Ito's palette: told apart with every common kind of colour blindness.
INK, GREY, PALE = "#222222", "#7a7a7a", "#d9d9d9"
UP, DOWN = "#D55E00", "#0072B2"
ENGINE_COLOURS = {"hf": "#0072B2", "vllm": "#D55E00"}
OTHER_COLOUR = "#009E73"
NOT_MEASURED = "Not drawn: this run did not measure it."
STYLE = {
    "svg.hashsalt": "kvlab",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is there on every machine
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "hatch.linewidth": 0.6,
}


def write(name: str, metrics: dict, folder: Path, otherwise: str = NOT_MEASURED) -> bool:
    """Write ``NAME.svg`` and ``NAME.csv`` into `folder`; both are always there afterwards.

    Where there is nothing to draw, the picture is the sentence `otherwise` and the CSV holds it in its
    one column ``not_drawn``, so an older picture cannot be taken for this run's.

    Returns
    -------
    bool
        Whether numbers were drawn.

    Raises
    ------
    UnknownName
        When there is no figure of that name.
    """
    if name not in FIGURES:
        raise UnknownName("figure", name, FIGURES)
    table = FIGURES[name][0](metrics)
    there = table is not None and not table.is_empty()
    if not there:
        table = pl.DataFrame({"not_drawn": [otherwise]})
    with atomic(folder / f"{name}.csv") as temporary:
        table.write_csv(temporary)
    with atomic(folder / f"{name}.svg") as temporary:
        picture(name if there else None, table, temporary)
    return there


def drawable(name: str, metrics: dict) -> bool:
    """Whether the metrics hold anything for this figure to draw."""
    table = FIGURES[name][0](metrics)
    return table is not None and not table.is_empty()


def picture(name: str | None, table: pl.DataFrame, path: Path) -> None:
    """Draw a figure's table as SVG; without a name the sentence that the table holds."""
    save((FIGURES[name][1] if name else sentence)(table), path)


def save(figure, path: Path, kind: str = "svg") -> None:
    """Save a matplotlib figure without date or program name."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None, "Creator": None} if kind == "svg" else None
        figure.savefig(path, format=kind, metadata=metadata, dpi=96)


def styled(draw: Callable) -> Callable:
    """Run a drawing function under the house style."""

    def inside(table: pl.DataFrame):
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(table)

    inside.__doc__, inside.__name__ = draw.__doc__, draw.__name__
    return inside


# ---------------------------------------------------------------------------------- gap_shapley


def gap_shapley_table(metrics: dict) -> pl.DataFrame | None:
    """Low corner, each factor's share, high corner, of KL; `start` is where a bar begins."""
    gap = metrics.get("gap")
    measure = gap and gap["measures"].get("kl")
    if not measure or not measure["parts"]:
        return None
    rows = [bar(corner_name(gap["low"]), "corner", 0.0, measure["low"])]
    start = measure["low"]["value"]
    for part in sorted(measure["parts"], key=lambda part: -abs(part["share"]["value"])):
        rows.append(bar(part["factor"], "share", start, part["share"]))
        start += part["share"]["value"]
    rows.append(bar(corner_name(gap["high"]), "corner", 0.0, measure["high"]))
    return pl.DataFrame(rows)


def bar(name: str, kind: str, start: float, given: dict) -> dict:
    """One bar of the decomposition; all numbers in nats per token."""
    numbers = {key: float(given[key]) for key in ("value", "low", "high")}
    return {"name": name, "kind": kind, "start": float(start)} | numbers


def corner_name(corner: dict) -> str:
    """A corner of the decomposition in words; ratios by their own name."""
    words = [
        f"{key} {fmt.plain(value)}" if isinstance(value, float | int) else str(value) for key, value in corner.items()
    ]
    return ", ".join(words)


@styled
def gap_shapley(table: pl.DataFrame):
    """From the low corner to the high one, factor by factor, each with its interval."""
    figure, (axis,) = canvas(height=1.15 + 0.42 * len(table))
    texts = fmt.column(table.to_dicts(), signed=False)
    names, ends = [], [0.0]
    for row, (line, text) in enumerate(zip(table.iter_rows(named=True), texts, strict=True)):
        clear = line["kind"] == "corner" or not fmt.contains_zero(line)
        colour = GREY if line["kind"] == "corner" else UP if line["value"] > 0 else DOWN
        reach = waterfall_bar(axis, row, line, colour, clear)
        axis.text(max(reach), row, "  " + text, va="center", ha="left")
        names.append(wrapped(line["name"]) + ("" if clear else "\n(not resolved)"))
        ends += reach
    connect(axis, table)
    axis.set_yticks(range(len(table)), names)
    axis.invert_yaxis()
    axis.axvline(0, color=GREY, linewidth=0.8)
    room = (max(ends) - min(ends)) or 1.0
    axis.set_xlim(min(ends) - 0.02 * room, max(ends) + 0.55 * room)
    axis.set_xlabel("KL to the engine's own uncompressed output, nats per token")
    title(figure, "How the gap between the two corners divides among the factors")
    return figure


def waterfall_bar(axis, row: int, line: dict, colour: str, clear: bool) -> list[float]:
    """A bar from where the last one ended, hatched when not clear of zero; returns the x it touches."""
    axis.barh(
        row,
        line["value"],
        left=line["start"],
        height=0.56,
        color=colour if clear else "white",
        edgecolor=colour,
        hatch=None if clear else "////",
        linewidth=0.8,
    )
    low, high = line["start"] + line["low"], line["start"] + line["high"]
    axis.plot([low, high], [row, row], color=INK, linewidth=1.3, solid_capstyle="butt")
    return [low, high, line["start"], line["start"] + line["value"]]


def connect(axis, table: pl.DataFrame) -> None:
    """Thin lines that carry each bar's end to the next bar's start."""
    level = table["value"][0]
    for row, line in enumerate(table.iter_rows(named=True)):
        if row == len(table) - 1:
            break
        level = line["start"] + line["value"]
        axis.plot([level, level], [row + 0.28, row + 0.72], color=GREY, linewidth=0.8)


# ------------------------------------------------------------------------------------- baseline


def baseline_table(metrics: dict) -> pl.DataFrame | None:
    """One row per uncompressed run: its KL to the float32 truth, nats per token."""
    rows = [
        {key: row[key] for key in ("run", "engine", "dtype", "attention")} | interval(row["kl"])
        for row in metrics.get("baseline") or []
    ]
    return pl.DataFrame(rows) if rows else None


@styled
def baseline(table: pl.DataFrame):
    """Dots with intervals on a logarithmic axis, one row per run."""
    figure, (axis,) = canvas(height=1.15 + 0.36 * len(table))
    floor = log_axis(axis, table, labelled=True)
    for row, line in enumerate(table.iter_rows(named=True)):
        dot(axis, row, line, colour_of(line["engine"]), floor, label=True)
    names = [f"{r['engine']}, {r['dtype']}, {r['attention']}" for r in table.iter_rows(named=True)]
    rows_axis(axis, names)
    axis.set_xlabel("KL to the float32 truth, nats per token (logarithmic)")
    title(figure, "Without any codec: how far each engine and dtype is from the float32 truth")
    return figure


# ---------------------------------------------------------------------------------------- cells


def cells_table(metrics: dict) -> pl.DataFrame | None:
    """One row per coded cell in the dtype of the gap: net KL and bits per value."""
    coded = [cell for cell in metrics.get("cells") or [] if cell["variance_ratio"] is not None]
    reduced = [cell for cell in coded if cell["dtype"] != "float32"]
    keys = ("cell_id", "label", "engine", "dtype", "protocol", "variance_ratio", "bits_per_value")
    rows = [
        {key: cell[key] for key in keys} | interval(cell["kl_net"])
        for cell in reduced or coded
        if cell["kl_net"] is not None
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def cells(table: pl.DataFrame):
    """One row per recipe and protocol, one dot per engine, net KL on a logarithmic axis."""
    lines = table.to_dicts()
    names = list(dict.fromkeys(cell_name(line) for line in lines))
    engines = list(dict.fromkeys(line["engine"] for line in lines))
    figure, (axis,) = canvas(height=1.35 + 0.42 * len(names))
    floor = log_axis(axis, table)
    for line in lines:
        shift = 0.24 * (engines.index(line["engine"]) - (len(engines) - 1) / 2)
        dot(axis, names.index(cell_name(line)) + shift, line, colour_of(line["engine"]), floor)
    rows_axis(axis, names)
    legend(axis, engines)
    axis.text(
        -0.008,
        1.0,
        "stream, protocol, variance_ratio",
        transform=axis.transAxes,
        color=GREY,
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axis.set_xlabel("KL net of the engine's own noise floor, nats per token (logarithmic)")
    title(figure, f"What the codec costs, by stream, protocol and engine ({', '.join(dtypes(lines))})")
    return figure


def cell_name(line: dict) -> str:
    """A cell's name on the axis: what is coded, where, at which ratio."""
    return f"{line['label']}, {line['protocol']}, {fmt.plain(line['variance_ratio'])}"


def dtypes(lines: list[dict]) -> list[str]:
    """The dtypes of some rows, each once."""
    return list(dict.fromkeys(line["dtype"] for line in lines))


# --------------------------------------------------------------------------------------- layers


def layers_table(metrics: dict) -> pl.DataFrame | None:
    """One row per coded layer, protocol and engine: KL and its q-value; `clear` marks discoveries."""
    alpha = 1 - metrics["sizes"]["confidence"]
    rows = [
        {"engine": row["engine"], "protocol": row["protocol"], "layer": row["layer"]}
        | interval(row["kl"])
        | {"q_value": row["q_value"], "clear": row["q_value"] is not None and row["q_value"] <= alpha}
        for row in metrics.get("layers") or []
        if row["layer"] is not None
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def layers(table: pl.DataFrame):
    """KL of coding one layer alone; a panel per protocol, an open dot where the q-value is too large."""
    from matplotlib.ticker import MaxNLocator

    protocols = list(dict.fromkeys(table["protocol"]))
    engines = list(dict.fromkeys(table["engine"]))
    figure, axes = canvas(height=3.5, panels=len(protocols))
    bottom = min(0.0, table["low"].min())
    room = (table["high"].max() - bottom) or 1.0
    for axis, protocol in zip(axes, protocols, strict=True):
        lines = [line for line in table.to_dicts() if line["protocol"] == protocol]
        few = len(lines) <= 16 // len(protocols)
        for line in lines:
            layer_dot(axis, line, engines, label=few)
        axis.axhline(0, color=GREY, linewidth=0.8)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=24, integer=True))
        axis.set_xlabel("coded layer")
        axis.set_title(f"protocol {protocol}", fontsize=9, fontweight="normal", color=GREY, loc="right")
        axis.margins(x=0.08)
        axis.set_ylim(bottom - 0.04 * room, bottom + 1.15 * room)
        legend(axis, engines)
    axes[0].set_ylabel("KL, nats per token")
    title(figure, "What coding one layer alone costs (open dot: not told from zero; text: q-value)")
    return figure


def layer_dot(axis, line: dict, engines: list[str], label: bool) -> None:
    """One layer's KL with its interval, and its q-value above it when there is room."""
    place = line["layer"] + 0.3 * (engines.index(line["engine"]) - (len(engines) - 1) / 2)
    colour = colour_of(line["engine"])
    axis.plot([place, place], [line["low"], line["high"]], color=colour, linewidth=1.4)
    axis.plot(
        place,
        line["value"],
        "o",
        color=colour,
        markersize=6,
        markeredgewidth=1.3,
        markerfacecolor=colour if line["clear"] else "white",
    )
    if label and line["q_value"] is not None:
        axis.annotate(
            f"{line['q_value']:.2g}",
            (place, line["high"]),
            xytext=(5 * (1 - 2 * engines.index(line["engine"])) if len(engines) > 1 else 0, 3),
            color=colour,
            textcoords="offset points",
            ha=("right", "left")[min(1, engines.index(line["engine"]))] if len(engines) > 1 else "center",
            va="bottom",
            fontsize=7,
        )


# ---------------------------------------------------------------------------------------- noise


def noise_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, stream and sigma; the slope of its line and whether sigma is inside its range."""
    slopes = {(row["engine"], row["stream"]): row for row in metrics.get("noise_slope") or []}
    rows = []
    for row in metrics.get("noise") or []:
        fit = slopes.get((row["engine"], row["stream"]))
        slope = fit["slope"] if fit and fit["slope"] else {"value": None, "low": None, "high": None}
        inside = bool(fit and fit["range"] and fit["range"][0] <= row["sigma"] <= fit["range"][1])
        rows.append(
            {key: row[key] for key in ("engine", "stream", "sigma")}
            | interval(row["kl"])
            | {f"slope_{key}": slope[key] for key in ("value", "low", "high")}
            | {"in_range": inside}
        )
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def noise(table: pl.DataFrame):
    """KL against the size of the noise, both axes logarithmic; a panel per stream."""
    streams = list(dict.fromkeys(table["stream"]))
    engines = list(dict.fromkeys(table["engine"]))
    figure, axes = canvas(height=3.7, panels=len(streams), share=True)
    for axis, stream in zip(axes, streams, strict=True):
        axis.set(xscale="log", yscale="log")
        for engine in engines:
            lines = [r for r in table.to_dicts() if (r["stream"], r["engine"]) == (stream, engine)]
            noise_line(axis, sorted(lines, key=lambda r: r["sigma"]), engine, engines.index(engine))
        axis.set_xlabel(f"noise on {stream.upper()}, times its rms")
        axis.grid(color=PALE, linewidth=0.5)
    axes[0].set_ylabel("KL, nats per token")
    title(figure, "How fast KL grows with plain Gaussian noise (dashed: fitted slope)")
    return figure


def noise_line(axis, lines: list[dict], engine: str, order: int) -> None:
    """One engine's curve with intervals, its fitted line, and its name with the slope."""
    shown = [line for line in lines if line["value"] > 0]
    if not shown:
        return
    colour, shape = colour_of(engine), "os^D"[order % 4]
    axis.plot(
        [r["sigma"] for r in shown],
        [r["value"] for r in shown],
        color=colour,
        marker=shape,
        markersize=max(3.0, 7.5 - 3.5 * order),  # the later one on top lets the earlier one be seen
        linewidth=max(0.8, 2.4 - 1.4 * order),
        zorder=3 + order,
        markerfacecolor="white" if order else colour,
    )
    for line in shown:
        low = line["low"] if line["low"] > 0 else line["value"]
        axis.plot([line["sigma"]] * 2, [low, max(line["high"], low)], color=colour, linewidth=1.4)
    text = engine
    fitted = [line for line in shown if line["in_range"] and line["slope_value"] is not None]
    if fitted:
        text += f": slope {fmt.estimate(estimate_of(fitted[0], 'slope_'))}"
        fitted_line(axis, fitted, colour)
    axis.text(
        0.03,
        0.96 - 0.075 * order,
        text,
        transform=axis.transAxes,
        color=colour,
        va="top",
        fontweight="bold",
        fontsize=8,
    )


def fitted_line(axis, lines: list[dict], colour: str) -> None:
    """The fitted power law through the geometric centre of the points that it was fitted to."""
    from math import exp, log

    centre_x = sum(log(line["sigma"]) for line in lines) / len(lines)
    centre_y = sum(log(line["value"]) for line in lines) / len(lines)
    ends = [lines[0]["sigma"], lines[-1]["sigma"]]
    heights = [exp(centre_y + lines[0]["slope_value"] * (log(x) - centre_x)) for x in ends]
    axis.plot(ends, heights, color=colour, linestyle=(0, (4, 2)), linewidth=1)


# ---------------------------------------------------------------------------------- shared parts


@styled
def sentence(table: pl.DataFrame):
    """A picture that says why there is none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8))
    figure.text(0.02, 0.5, table["not_drawn"][0], va="center", color=GREY)
    return figure


def interval(given: dict) -> dict:
    """An Estimate's three numbers as floats, for a table's row."""
    return {key: float(given[key]) for key in ("value", "low", "high")}


def estimate_of(line: dict, prefix: str = "") -> dict:
    """The Estimate in a table's row."""
    return {key: line[prefix + key] for key in ("value", "low", "high")}


def canvas(height: float, panels: int = 1, share: bool = False):
    """A figure of the house width and its axes, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, panels, sharex=share, sharey=True, squeeze=False)[0]
    return figure, list(axes)


def title(figure, text: str) -> None:
    """What is to be seen, flush left above everything."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=10.5, fontweight="bold")


def wrapped(name: str) -> str:
    """A corner's long name on two lines."""
    head, comma, tail = name.rpartition(", ")
    return f"{head},\n{tail}" if comma else name


def colour_of(engine: str) -> str:
    """An engine keeps its colour in all figures."""
    return ENGINE_COLOURS.get(engine, OTHER_COLOUR)


def legend(axis, engines: list[str]) -> None:
    """Engine names in their colours, in place of a legend; none when there is nothing to tell apart."""
    if len(engines) < 2:
        return
    for order, engine in enumerate(engines):
        axis.text(
            0.01 + 0.09 * order,
            1.0,
            engine,
            transform=axis.transAxes,
            color=colour_of(engine),
            va="bottom",
            fontweight="bold",
        )


def rows_axis(axis, names: list[str]) -> None:
    """Name the rows, first on top, with faint guides."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="x", color=PALE, linewidth=0.5)
    axis.tick_params(axis="y", length=0, pad=8)


def log_axis(axis, table: pl.DataFrame, labelled: bool = False) -> float:
    """Make x logarithmic over the positive values; returns its left end, where zeros are put.

    `labelled` leaves room for a number to the right of every dot.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    positive = [x for name in ("value", "low", "high") for x in table[name] if x > 0] or [1e-12, 1.0]
    centres = [x for x in table["value"] if x > 0] or positive
    low, high = max(min(positive), min(centres) / 100), max(positive)
    floor = low / max(2.0, (high / low) ** 0.06)
    ratio = high / floor
    axis.set_xscale("log")
    axis.set_xlim(floor, high * (ratio**0.5 if labelled else 1.3))
    if ratio < 300:  # too few powers of ten to read a value by
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    return floor


def dot(axis, row: float, line: dict, colour: str, floor: float, label: bool = False) -> None:
    """A value with its interval; one that is not above zero is an arrow at the left end, with its number."""
    low, high = max(line["low"], floor), max(line["high"], floor)
    axis.plot([low, high], [row, row], color=colour, linewidth=1.4, solid_capstyle="butt")
    above = line["value"] > 0
    axis.plot(
        line["value"] if above else floor,
        row,
        "o" if above else "<",
        color=colour,
        markersize=5.5,
        clip_on=False,
    )
    if label or not above:
        axis.annotate(
            fmt.estimate(line),
            (max(high, floor), row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )


FIGURES: dict[str, tuple[Callable, Callable]] = {
    "gap_shapley": (gap_shapley_table, gap_shapley),
    "baseline": (baseline_table, baseline),
    "cells": (cells_table, cells),
    "layers": (layers_table, layers),
    "noise": (noise_table, noise),
}

"""How fast KL grows with plain Gaussian noise, with the fitted power law and the rounding that it predicts."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import GREY, PALE, WIDTH, colour_of, interval, styled, title

GROUPS = {"all": "all layers", "coded": "coded layers", "boundary": "boundary layers"}
NOISE, CAST = "noise", "cast"


def noise_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, stream, layer group and sigma; the slope of its line, whether sigma is inside its range.

    `what` is ``noise``, or ``cast`` for the measured rounding of one stream to a shorter dtype, which stands at
    that dtype's sigma.
    """
    fits = {(row["engine"], row["stream"], row["group"]): row for row in metrics.get("noise_slope") or []}
    rows = []
    for row in metrics.get("noise") or []:
        fit = fits.get((row["engine"], row["stream"], row["group"]))
        inside = bool(fit and fit["range"] and fit["range"][0] <= row["sigma"] <= fit["range"][1])
        rows.append(table_row(row, NOISE, row["kl"], fit["slope"] if fit else None, inside))
    panels = {(row["stream"], row["group"]) for row in rows}
    for row in metrics.get("closure") or []:
        if row["against"] == "cast" and (row["stream"], "all") in panels:
            rows.append(table_row(row | {"group": "all"}, CAST, row["measured"], None, False))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def table_row(row: dict, what: str, kl: dict, slope: dict | None, inside: bool) -> dict:
    """One drawn number."""
    slope = slope or dict.fromkeys(("value", "low", "high"))
    return (
        {"what": what}
        | {key: row[key] for key in ("engine", "stream", "group")}
        | {"sigma": float(row["sigma"])}
        | interval(kl)
        | {f"slope_{key}": slope[key] for key in ("value", "low", "high")}
        | {"in_range": inside}
    )


@styled
def noise(table: pl.DataFrame):
    """KL against the size of the noise, both axes logarithmic; a row per stream, a column per layer group."""
    from matplotlib.figure import Figure

    streams, groups, engines = (list(dict.fromkeys(table[key])) for key in ("stream", "group", "engine"))
    figure = Figure(figsize=(WIDTH, 0.9 + 2.3 * len(streams)), layout="constrained")
    axes = figure.subplots(len(streams), len(groups), sharex=True, sharey=True, squeeze=False)
    for row, stream in zip(axes, streams, strict=True):
        for axis, group in zip(row, groups, strict=True):
            lines = [r for r in table.to_dicts() if (r["stream"], r["group"]) == (stream, group)]
            panel(axis, lines, engines)
            words = f"{stream.upper()}, {GROUPS[group]}"
            axis.set_title(words, fontsize=9, fontweight="normal", color=GREY, loc="right")
        row[0].set_ylabel("KL, nats per token")
    for axis in axes[-1]:
        axis.set_xlabel("noise, times rms")
    if table["high"].max() > 0:
        axes[0, 0].set_ylim(top=30 * table["high"].max())  # room for the slopes
    also = "; diamond: rounding" if CAST in table["what"] else ""
    title(figure, f"How fast KL grows with plain Gaussian noise (dashed: fitted slope{also})")
    return figure


def panel(axis, lines: list[dict], engines: list[str]) -> None:
    """One stream and layer group."""
    axis.set(xscale="log", yscale="log")
    axis.grid(color=PALE, linewidth=0.5)
    for order, engine in enumerate(engines):
        mine = sorted((line for line in lines if line["engine"] == engine), key=lambda line: line["sigma"])
        noise_line(axis, [line for line in mine if line["what"] == NOISE], engine, order)
        for line in mine:
            if line["what"] == CAST and line["value"] > 0:
                cast_mark(axis, line, order)


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
        markersize=max(3.0, 6.5 - 3 * order),  # the later one on top lets the earlier one be seen
        linewidth=max(0.8, 2.2 - 1.3 * order),
        zorder=3 + order,
        markerfacecolor="white" if order else colour,
    )
    for line in shown:
        whisker(axis, line, colour)
    text = engine
    fitted = [line for line in shown if line["in_range"] and line["slope_value"] is not None]
    if fitted:
        text += f": {fmt.estimate(estimate_of(fitted[0], 'slope_'))}"
        fitted_line(axis, fitted, colour)
    place = {"transform": axis.transAxes, "va": "top", "fontsize": 7.5, "fontweight": "bold"}
    axis.text(0.03, 0.97 - 0.1 * order, text, color=colour, **place)


def cast_mark(axis, line: dict, order: int) -> None:
    """A rounding with its interval."""
    colour = colour_of(line["engine"])
    whisker(axis, line, colour)
    look = {"markersize": max(5.0, 9.0 - 3 * order), "markeredgewidth": 1.2, "zorder": 6 + order}
    axis.plot(line["sigma"], line["value"], "D", color=colour, markerfacecolor="none", **look)


def whisker(axis, line: dict, colour: str) -> None:
    """An interval; it ends at its value where it reaches zero."""
    low = line["low"] if line["low"] > 0 else line["value"]
    axis.plot([line["sigma"]] * 2, [low, max(line["high"], low)], color=colour, linewidth=1.4)


def fitted_line(axis, lines: list[dict], colour: str) -> None:
    """The fitted power law over the points that it was fitted to."""
    ends, heights = fitted_ends(lines)
    axis.plot(ends, heights, color=colour, linestyle=(0, (4, 2)), linewidth=1)


def fitted_ends(lines: list[dict]) -> tuple[list[float], list[float]]:
    """Both ends of the power law through the geometric centre of the points that it was fitted to."""
    from math import exp, log

    centre_x = sum(log(line["sigma"]) for line in lines) / len(lines)
    centre_y = sum(log(line["value"]) for line in lines) / len(lines)
    ends = [lines[0]["sigma"], lines[-1]["sigma"]]
    return ends, [exp(centre_y + lines[0]["slope_value"] * (log(x) - centre_x)) for x in ends]


def estimate_of(line: dict, prefix: str = "") -> dict:
    """The Estimate in a table's row."""
    return {key: line[prefix + key] for key in ("value", "low", "high")}

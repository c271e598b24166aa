"""How fast KL grows with plain Gaussian noise, with the fitted power law."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import PALE, canvas, colour_of, interval, styled, title


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


def estimate_of(line: dict, prefix: str = "") -> dict:
    """The Estimate in a table's row."""
    return {key: line[prefix + key] for key in ("value", "low", "high")}

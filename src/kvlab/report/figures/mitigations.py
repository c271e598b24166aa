"""KL against bytes: uniform spending as a curve, and what favouring layers makes of as many."""

from __future__ import annotations

import polars as pl

from kvlab.report.figures.canvas import GREY, INK, PALE, canvas, colour_of, interval, legend, styled, title

PLACE = ("engine", "protocol", "arm")
# matplotlib's marker, plotly's symbol, and the words of the legend; arms of klt are drawn open
MARKS = {
    "uniform": ("o", "circle", "uniform"),
    "moved": ("s", "square", "other boundary layers"),
    "greedy": ("D", "diamond", "boundary layers from none"),
    "extended": ("^", "triangle-up", "boundary layers extended"),
    "hot": ("*", "star", "hot layers"),
    "klt uniform": ("o", "circle", "klt, uniform"),
    "klt boundary": ("s", "square", "klt, boundary layers"),
    "klt hot": ("*", "star", "klt, hot layers"),
}


def mitigations_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, protocol and arm: KL, bits per value, the favoured layers; `kind` is a key of `MARKS`."""
    rows = [
        {key: row[key] for key in PLACE}
        | {
            "kind": "uniform" if row["arm"].startswith("uniform") else row["arm"],
            "layers": " ".join(map(str, row["layers"])) or "none",
            "bits_per_value": row["bits_per_value"],
        }
        | interval(row["kl"])
        for row in (metrics.get("mitigations") or {}).get("arms") or []
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def mitigations(table: pl.DataFrame):
    """KL on a logarithmic axis over bits per value, a panel per protocol, engines by colour, arms by mark."""
    protocols, engines = (list(dict.fromkeys(table[key])) for key in ("protocol", "engine"))
    figure, axes = canvas(height=4.6, panels=len(protocols), share=True)
    for axis, protocol in zip(axes, protocols, strict=True):
        axis.set_yscale("log")
        axis.grid(color=PALE, linewidth=0.5)
        for engine in engines:
            lines = [line for line in table.to_dicts() if (line["protocol"], line["engine"]) == (protocol, engine)]
            one_engine(axis, lines, colour_of(engine), smaller(engines, engine))
        axis.set_title(protocol, fontsize=9, fontweight="normal", color=GREY, loc="right")
        axis.set_xlabel("bits per value of the whole cache")
    axes[0].set_ylabel("KL, nats per token")
    legend(axes[0], engines)
    mark_legend(figure, list(dict.fromkeys(table["kind"])))
    title(figure, "Where bytes are spent: uniformly (line), or on favoured layers")
    return figure


def one_engine(axis, lines: list[dict], colour: str, scale: float) -> None:
    """One engine's curve and arms; what is not above zero has no place on a logarithmic axis."""
    shown = [line for line in lines if line["value"] > 0]
    curve = curve_of(shown)
    at, heights = ([line[key] for line in curve] for key in ("bits_per_value", "value"))
    axis.plot(at, heights, color=colour, linewidth=1.6 * scale)
    for line in shown:
        at, low = line["bits_per_value"], line["low"] if line["low"] > 0 else line["value"]
        axis.plot([at, at], [low, max(line["high"], low)], color=colour, linewidth=1.2)
        face = "white" if is_open(line["kind"]) else colour
        size = 4 if line["kind"] == "uniform" else 9 if MARKS[line["kind"]][0] == "*" else 6
        axis.plot(
            at, line["value"], MARKS[line["kind"]][0], color=colour, markersize=scale * size, markerfacecolor=face
        )


def smaller(engines: list[str], engine: str) -> float:
    """By how much an engine's marks are scaled: each engine's are drawn over the last one's, which stay seen."""
    return (1.5, 0.9, 0.6)[min(engines.index(engine), 2)] if len(engines) > 1 else 1.0


def curve_of(lines: list[dict]) -> list[dict]:
    """The points of uniform spending on the studied codec, fewest bytes first."""
    return sorted((line for line in lines if line["kind"] == "uniform"), key=lambda line: line["bits_per_value"])


def is_open(kind: str) -> bool:
    """Whether a mark is drawn open."""
    return kind.startswith("klt")


def mark_legend(figure, kinds: list[str]) -> None:
    """Below the panels, which mark is which arm."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=INK,
            marker=MARKS[kind][0],
            markerfacecolor="white" if is_open(kind) else INK,
            linestyle="-" if kind == "uniform" else "",
            linewidth=1,
            markersize=5,
            label=MARKS[kind][2],
        )
        for kind in kinds
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)

"""What coding one layer alone costs, and which layers can be told from zero."""

from __future__ import annotations

import polars as pl

from kvlab.report.figures.canvas import GREY, canvas, colour_of, interval, legend, styled, title


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

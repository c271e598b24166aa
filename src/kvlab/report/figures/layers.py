"""What each layer's K and V cost, alone and left out, and which of them can be told from zero."""

from __future__ import annotations

import polars as pl

from kvlab.report.figures.canvas import GREY, PALE, WIDTH, colour_of, interval, legend, styled, title

KINDS = {"only": "alone", "but": "left out"}
SHAPES = "os^D"
PLACE = ("engine", "protocol", "stream", "kind", "layer", "boundary")


def layers_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, protocol, stream, kind and layer: net KL and its q-value; `clear` marks discoveries."""
    alpha = round(1 - metrics["sizes"]["confidence"], 9)
    rows = [
        {key: row[key] for key in PLACE}
        | interval(row["kl"])
        | {"q_value": row["q_value"], "clear": row["q_value"] is not None and row["q_value"] <= alpha}
        for row in metrics.get("layers") or []
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def layers(table: pl.DataFrame):
    """Net KL by layer: a row of panels per kind, a column per stream, an open mark where q is too large."""
    from matplotlib.figure import Figure

    kinds, streams, engines, protocols = (
        list(dict.fromkeys(table[key])) for key in ("kind", "stream", "engine", "protocol")
    )
    figure = Figure(figsize=(WIDTH, 0.9 + 2.3 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), len(streams), sharex=True, sharey="row", squeeze=False)
    for row, kind in zip(axes, kinds, strict=True):
        for axis, stream in zip(row, streams, strict=True):
            lines = [line for line in table.to_dicts() if (line["kind"], line["stream"]) == (kind, stream)]
            panel(axis, lines, engines, protocols)
            words = f"{stream.upper()} {KINDS[kind]}"
            axis.set_title(words, fontsize=9, fontweight="normal", color=GREY, loc="right")
        row[0].set_ylabel("KL, nats per token")
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    legend(axes[0, 0], engines)
    protocol_legend(figure, protocols)
    title(figure, "What each layer costs (open: not told from zero; shaded: boundary layers)")
    return figure


def panel(axis, lines: list[dict], engines: list[str], protocols: list[str]) -> None:
    """One stream and kind: engines by colour, protocols by shape, side by side within a layer."""
    from matplotlib.ticker import MaxNLocator

    series = [(engine, protocol) for engine in engines for protocol in protocols]
    count = len({line["layer"] for line in lines})
    for layer in sorted({line["layer"] for line in lines if line["boundary"]}):
        axis.axvspan(layer - 0.5, layer + 0.5, color=PALE, alpha=0.45, linewidth=0)
    for line in lines:
        order = series.index((line["engine"], line["protocol"]))
        shape = SHAPES[protocols.index(line["protocol"]) % len(SHAPES)]
        layer_mark(axis, line, beside(order, len(series)), shape, size=5 if count <= 12 else 2.2)
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axis.set_xlim(-0.6, max(line["layer"] for line in lines) + 0.6)


def beside(order: int, count: int) -> float:
    """How far from a layer's place the mark of one of its `count` series stands."""
    return 0.7 * (order - (count - 1) / 2) / count


def layer_mark(axis, line: dict, shift: float, shape: str, size: float) -> None:
    """One layer's cost with its interval."""
    place, colour = line["layer"] + shift, colour_of(line["engine"])
    axis.plot([place, place], [line["low"], line["high"]], color=colour, linewidth=size / 4)
    face = colour if line["clear"] else "white"
    axis.plot(
        place, line["value"], shape, color=colour, markersize=size, markeredgewidth=size / 5, markerfacecolor=face
    )


def protocol_legend(figure, protocols: list[str]) -> None:
    """Below the panels, which shape is which protocol; none when there is nothing to tell apart."""
    from matplotlib.lines import Line2D

    if len(protocols) < 2:
        return
    handles = [
        Line2D([], [], color=GREY, marker=SHAPES[order % len(SHAPES)], linestyle="", label=protocol)
        for order, protocol in enumerate(protocols)
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(protocols), frameon=False, fontsize=8)

"""Interactive: what each layer's K and V cost, alone and left out."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import PALE
from kvlab.report.figures.interactive import marks
from kvlab.report.figures.layers import KINDS, beside
from kvlab.report.tables import parts as tables

HEIGHT = 300  # pixels of a row of panels
ROW_GAP = 0.2  # of the figure's height


def interactive_layers(table: pl.DataFrame):
    """Net KL by layer: a row of panels per kind, a column per stream, an open mark where q is too large."""
    lines = marks.numbered(table)
    kinds, streams, engines, protocols = (
        list(dict.fromkeys(line[key] for line in lines)) for key in ("kind", "stream", "engine", "protocol")
    )
    series = [(engine, protocol) for engine in engines for protocol in protocols]
    traces = [marks.key(", ".join(one), mode="markers", marker=look(engines, protocols, *one)) for one in series]
    axes, said, shapes = {}, [], []
    cells = [(kind, stream) for kind in kinds for stream in streams]
    for (kind, stream), (suffix, across, up) in zip(cells, grid(len(kinds), len(streams)), strict=True):
        mine = [line for line in lines if (line["kind"], line["stream"]) == (kind, stream)]
        place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        traces += [dots(mine, engines, protocols, one, series, place) for one in series]
        plain = {"showgrid": False, "zeroline": False, "showline": True, "tickformat": "d"}
        axes[f"xaxis{suffix}"] = marks.axis("layer", domain=across, anchor=f"y{suffix}", **plain)
        axes[f"yaxis{suffix}"] = marks.axis(
            f"KL, {tables.KL_UNIT}", domain=up, anchor=f"x{suffix}", rangemode="tozero", zeroline=True
        )
        first = cells.index((kind, streams[0]))
        if stream != streams[0]:  # one scale for both streams
            axes[f"yaxis{suffix}"] |= {"matches": "y" if first == 0 else f"y{first + 1}", "title": None}
        words = f"{stream.upper()} {KINDS[kind]}"
        said.append(marks.panel_words(suffix, words, 1, 1, xanchor="right", yanchor="bottom"))
        shapes += [shade(layer, suffix) for layer in sorted({line["layer"] for line in mine if line["boundary"]})]
    note = (
        "An open mark is a layer that is not told from zero after the correction for looking at many layers; "
        "boundary layers are shaded."
    )
    meta = {"panels": len(cells), "panel_rows": len(kinds)}
    return marks.figure(traces, HEIGHT * len(kinds), note, annotations=said, shapes=shapes, meta=meta, **axes)


def grid(rows: int, columns: int) -> list[tuple[str, list[float], list[float]]]:
    """Axis suffix, horizontal and vertical domain of each panel, row by row from the top."""
    height = (1 - ROW_GAP * (rows - 1)) / rows
    found = []
    for row in range(rows):
        top = 1 - row * (height + ROW_GAP)
        for column, (_, across) in enumerate(marks.panels(columns)):
            number = row * columns + column
            found.append(("" if number == 0 else str(number + 1), across, [max(0.0, top - height), top]))
    return found


def look(engines: list[str], protocols: list[str], engine: str, protocol: str) -> dict:
    """Engines by colour, protocols by shape."""
    colour = marks.engine_look(engines, engine)["color"]
    return {"color": colour, "symbol": marks.SYMBOLS[protocols.index(protocol) % len(marks.SYMBOLS)], "size": 9}


def dots(lines: list[dict], engines: list[str], protocols: list[str], one: tuple, series: list, place: dict) -> dict:
    """One engine's layers under one protocol in one panel."""
    mine = [line for line in lines if (line["engine"], line["protocol"]) == one]
    seen = look(engines, protocols, *one)
    at, bars = marks.whiskers(mine, seen["color"])
    shift = beside(series.index(one), len(series))
    marker = seen | {
        "color": [seen["color"] if line["clear"] else marks.PAPER for line in mine],
        "line": {"color": seen["color"], "width": 2},
    }
    x = [line["layer"] + shift for line in mine]
    return marks.points(
        mine, words, x=x, y=at, error_y=bars, marker=marker, mode="markers", name=", ".join(one), **place
    )


def shade(layer: int, suffix: str) -> dict:
    """The ground of a boundary layer."""
    place = {"xref": f"x{suffix}", "yref": f"y{suffix} domain", "x0": layer - 0.5, "x1": layer + 0.5, "y0": 0, "y1": 1}
    return place | {"type": "rect", "layer": "below", "fillcolor": PALE, "opacity": 0.4, "line": {"width": 0}}


def words(line: dict) -> list[str]:
    """A layer's hover text."""
    clear = "clear of zero" if line["clear"] else "not told from zero"
    boundary = ", a boundary layer" if line["boundary"] else ""
    return [
        f"{line['stream'].upper()} of layer {fmt.number(line['layer'])} {KINDS[line['kind']]}{boundary}",
        f"{line['engine']}, {line['protocol']}",
        marks.quantity("KL", line),
        f"q-value {fmt.number(line['q_value'])}, {clear}",
        marks.basis(line),
    ]

"""Interactive: the codec's own error layer by layer, and the ranks that its blocks keep, on each engine's capture."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import GREY, colour_of, log_ends
from kvlab.report.figures.interactive import marks

HEIGHT = 400  # pixels


def interactive_residual(table: pl.DataFrame):
    """Relative squared error by layer on a logarithmic axis, a panel per stream; open dots: boundary layers."""
    lines = marks.numbered(table)
    streams, engines, ratios = (list(dict.fromkeys(table[key])) for key in ("stream", "engine", "variance_ratio"))
    ends = log_ends(table)
    traces = keys(engines, ratios, shape)
    axes = {}
    for stream, (suffix, domain) in zip(streams, marks.panels(len(streams)), strict=True):
        mine = [line for line in lines if line["stream"] == stream]
        for engine in engines:
            own = [line for line in mine if line["engine"] == engine]
            traces.append(dots(own, engines, ratios, ends[0], xaxis=f"x{suffix}", yaxis=f"y{suffix}"))
        name = f"layer ({stream.upper()}, {mine[0]['measure']})"
        axes[f"xaxis{suffix}"] = marks.axis(name, domain=domain, anchor=f"y{suffix}", tickformat="d")
        axes[f"xaxis{suffix}"] |= {"showgrid": False, "zeroline": False, "showline": True}
        axes[f"yaxis{suffix}"] = marks.log_axis(ends, "squared error, relative", anchor=f"x{suffix}", showline=True)
        if suffix:
            axes[f"yaxis{suffix}"] |= {"title": None}
    note = (
        "Squared error over the squared deviation from the heads' means; errors of K are weighed by Sigma_q. "
        "An open mark is a boundary layer. The axis is logarithmic."
    )
    return marks.figure(traces, HEIGHT, note, meta={"panels": len(streams)}, **axes)


def keys(engines: list[str], ratios: list[float], mark: Callable[[int], dict]) -> list[dict]:
    """The legend: engines by colour, and the variance ratios, if there are several, by `mark` of their place."""
    found = [marks.key(one, mode="markers", marker={"color": colour_of(one), "size": 9}) for one in engines]
    if len(ratios) > 1:
        for order, ratio in enumerate(ratios):
            look = {"size": 9, "line": {"color": GREY, "width": 2}} | mark(order)
            found.append(marks.key(f"variance_ratio {fmt.plain(ratio)}", mode="markers", marker=look))
    return found


def shape(order: int) -> dict:
    """A variance ratio's mark, by its place in the list."""
    return {"color": GREY, "symbol": marks.SYMBOLS[order % len(marks.SYMBOLS)]}


def face(order: int) -> dict:
    """A variance ratio's bar, by its place in the list."""
    return {"color": marks.PAPER if order else GREY, "symbol": "square"}


def dots(lines: list[dict], engines: list[str], ratios: list[float], floor: float, **place) -> dict:
    """One engine's layers in one panel, at every variance ratio."""
    engine = lines[0]["engine"]
    colour = colour_of(engine)
    at, bars = marks.whiskers(lines, colour, floor)
    marker = {
        "size": 9,
        "symbol": [marks.SYMBOLS[ratios.index(line["variance_ratio"]) % len(marks.SYMBOLS)] for line in lines],
        "color": [marks.PAPER if line["boundary"] else colour for line in lines],
        "line": {"color": colour, "width": 2},
    }
    shift = 0.26 * (engines.index(engine) - (len(engines) - 1) / 2)
    x = [line["layer"] + shift for line in lines]
    return marks.points(
        lines, error_words, x=x, y=at, error_y=bars, marker=marker, mode="markers", name=engine, **place
    )


def error_words(line: dict) -> list[str]:
    """A layer's hover text."""
    boundary = ["boundary layer"] if line["boundary"] else []
    return [
        f"{line['stream'].upper()} of layer {fmt.number(line['layer'])}, {line['engine']}",
        f"variance_ratio {fmt.plain(line['variance_ratio'])}",
        marks.quantity(f"relative squared error, {line['measure']},", line, unit=""),
        *boundary,
        basis(line),
    ]


def basis(line: dict) -> str:
    """What a number rests on; nothing is scored here."""
    return f"{fmt.number(line['n_windows'])} windows, {fmt.number(line['n_tokens'])} coded tokens"


def interactive_d_eff(table: pl.DataFrame):
    """Share of blocks by kept rank: a panel per stream, a colour per engine, open bars for later variance ratios."""
    lines = marks.numbered(table)
    streams, engines, ratios = (list(dict.fromkeys(table[key])) for key in ("stream", "engine", "variance_ratio"))
    traces = keys(engines, ratios, face)
    axes = {}
    reach = [table["d_eff"].min() - 1, table["d_eff"].max() + 1]
    for stream, (suffix, domain) in zip(streams, marks.panels(len(streams)), strict=True):
        for engine in engines:
            own = [line for line in lines if (line["stream"], line["engine"]) == (stream, engine)]
            traces.append(bars_of(own, engines, ratios, xaxis=f"x{suffix}", yaxis=f"y{suffix}"))
        axes[f"xaxis{suffix}"] = marks.axis(
            f"kept rank (d_eff) of {stream.upper()}", domain=domain, anchor=f"y{suffix}", range=reach
        )
        axes[f"xaxis{suffix}"] |= {"showgrid": False, "zeroline": False, "showline": True}
        axes[f"yaxis{suffix}"] = marks.axis("share of all blocks", anchor=f"x{suffix}", tickformat=".0%")
        axes[f"yaxis{suffix}"] |= {"rangemode": "tozero"} | ({"matches": "y", "title": None} if suffix else {})
    note = "Blocks of all layers; thin lines are intervals."
    return marks.figure(traces, HEIGHT, note, meta={"panels": len(streams)}, barmode="overlay", **axes)


def bars_of(lines: list[dict], engines: list[str], ratios: list[float], **place) -> dict:
    """One engine's blocks in one panel."""
    engine = lines[0]["engine"]
    colour, width = colour_of(engine), 0.8 / len(engines)
    marker = {
        "color": [marks.PAPER if ratios.index(line["variance_ratio"]) else colour for line in lines],
        "line": {"color": colour, "width": 1.4},
    }
    x = [line["d_eff"] + width * (engines.index(engine) - (len(engines) - 1) / 2) for line in lines]
    at, bars = marks.whiskers(lines, GREY)
    look = {"width": width, "marker": marker, "error_y": bars}
    return marks.points(lines, rank_words, kind="bar", x=x, y=at, name=engine, **look, **place)


def rank_words(line: dict) -> list[str]:
    """A bar's hover text."""
    return [
        f"rank {fmt.number(line['d_eff'])} of {line['stream'].upper()}, {line['engine']}",
        f"variance_ratio {fmt.plain(line['variance_ratio'])}",
        marks.quantity("share of all blocks", line, unit=""),
        f"{fmt.number(line['blocks'])} blocks",
        basis(line),
    ]

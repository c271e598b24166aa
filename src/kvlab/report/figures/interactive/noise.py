"""Interactive: how fast KL grows with plain Gaussian noise, and what a rounding costs beside it."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import colour_of, log_ends
from kvlab.report.figures.interactive import marks
from kvlab.report.figures.interactive.layers import grid
from kvlab.report.figures.noise import CAST, GROUPS, NOISE, fitted_ends
from kvlab.report.tables import parts as tables

HEIGHT = 310  # pixels of a row of panels


def interactive_noise(table: pl.DataFrame):
    """KL against the size of the noise, both axes logarithmic; a row per stream, a column per layer group."""
    lines = marks.numbered(table)
    streams, groups, engines = (
        list(dict.fromkeys(line[key] for line in lines)) for key in ("stream", "group", "engine")
    )
    ends = log_ends(table)
    roomy = (ends[0], 100 * ends[1])  # for the slopes
    sigmas = (table["sigma"].min() / 1.3, table["sigma"].max() * 1.2)
    traces = [marks.key(one, mode="lines+markers", **look(engines, one)) for one in engines]
    axes, said = {}, []
    cells = [(stream, group) for stream in streams for group in groups]
    for (stream, group), (suffix, across, up) in zip(cells, grid(len(streams), len(groups)), strict=True):
        mine = [line for line in lines if (line["stream"], line["group"]) == (stream, group)]
        place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        title, height = "noise, times rms", f"KL, {tables.KL_UNIT}" if group == groups[0] else None
        axes[f"xaxis{suffix}"] = marks.log_axis(sigmas, title, domain=across, anchor=f"y{suffix}", showline=True)
        axes[f"yaxis{suffix}"] = marks.log_axis(roomy, height, domain=up, anchor=f"x{suffix}", showline=True)
        words = f"{stream.upper()}, {GROUPS[group]}"
        said.append(marks.panel_words(suffix, words, 1, 1, xanchor="right", yanchor="bottom"))
        for order, engine in enumerate(engines):
            own = sorted((line for line in mine if line["engine"] == engine), key=lambda line: line["sigma"])
            noised = [line for line in own if line["what"] == NOISE]
            traces += curve(noised, engines, engine, ends[0], place)
            traces += roundings([line for line in own if line["what"] == CAST], engine, 15 - 5 * order, ends[0], place)
            said += slope_words(noised, engine, order, suffix)
    note = (
        "Both axes are logarithmic; a dashed line is the fitted power law over the range that it was fitted to, its "
        "slope is named. An open diamond is what rounding to a shorter dtype costs, at the size of its error. "
        "An arrow at the lower end stands for a value that is not above zero."
    )
    meta = {"panels": len(cells), "panel_rows": len(streams)}
    return marks.figure(traces, HEIGHT * len(streams), note, annotations=said, meta=meta, **axes)


def curve(lines: list[dict], engines: list[str], engine: str, floor: float, place: dict) -> list[dict]:
    """One engine's points with intervals in one panel, and its fitted line."""
    if not lines:
        return []
    colour, looks = colour_of(engine), look(engines, engine)
    at, bars = marks.whiskers(lines, colour, floor)
    symbol = looks["marker"]["symbol"]
    looks["marker"]["symbol"] = [symbol if line["value"] > 0 else "triangle-down" for line in lines]
    x = [line["sigma"] for line in lines]
    drawn = marks.points(lines, words_of, x=x, y=at, error_y=bars, mode="lines+markers", name=engine, **looks, **place)
    fitted = fitted_of(lines)
    if not fitted:
        return [drawn]
    x, y = fitted_ends(fitted)
    return [drawn, marks.guide(x=x, y=y, line={"color": colour, "width": 1.2, "dash": "dash"}, **place)]


def roundings(lines: list[dict], engine: str, size: int, floor: float, place: dict) -> list[dict]:
    """What rounding one stream costs, with its interval; a later engine's mark is smaller."""
    if not lines:
        return []
    colour = colour_of(engine)
    at, bars = marks.whiskers(lines, colour, floor)
    symbols = ["diamond-open" if line["value"] > 0 else "triangle-down" for line in lines]
    marker = {"color": colour, "size": size, "symbol": symbols, "line": {"width": 2, "color": colour}}
    x = [line["sigma"] for line in lines]
    return [marks.points(lines, words_of, x=x, y=at, error_y=bars, mode="markers", marker=marker, name=engine, **place)]


def look(engines: list[str], engine: str) -> dict:
    """An engine's marker and line; a later one's are smaller and open, so that an earlier one's are seen below."""
    order = engines.index(engine)
    marker = marks.engine_look(engines, engine, size=max(6, 11 - 4 * order))
    outline = {"line": {"color": marker["color"], "width": 1.6}}
    line = {"color": marker["color"], "width": 1 if order else 2.4}
    return {"marker": marker | outline | ({"color": marks.PAPER} if order else {}), "line": line}


def fitted_of(lines: list[dict]) -> list[dict]:
    """The rows that a slope was fitted to."""
    return [line for line in lines if line["in_range"] and line["slope_value"] is not None and line["value"] > 0]


def slope_words(lines: list[dict], engine: str, order: int, suffix: str) -> list[dict]:
    """An engine's slope in the corner of its panel."""
    fitted = fitted_of(lines)
    if not fitted:
        return []
    text = marks.quantity(f"{engine}:", fitted[0], "slope_", unit="")
    return [
        marks.panel_words(
            suffix, text, 0.02, 0.99, colour_of(engine), xanchor="left", yanchor="top", yshift=-18 * order
        )
    ]


def words_of(line: dict) -> list[str]:
    """A point's hover text."""
    slope = [] if line["slope_value"] is None else [marks.quantity("slope of its line", line, "slope_", unit="")]
    size = f"of {fmt.number(line['sigma'])} times its rms"
    stream = line["stream"].upper()
    what = f"noise on {stream} {size}" if line["what"] == NOISE else f"rounding {stream}, an error {size}"
    return [what, f"{line['engine']}, {GROUPS[line['group']]}", marks.quantity("KL", line), *slope, marks.basis(line)]

"""What the interactive figures share: colours by theme, points that say their numbers, panels."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import DOWN, GREY, INK, OTHER_COLOUR, PALE, UP, colour_of
from kvlab.report.tables import parts as tables

PAPER = "#ffffff"
# What a colour of the light theme becomes on the dark one. Marks keep a contrast of 3 to their ground, words 4.5.
DARK = {
    INK: "#e8e6e3",
    GREY: "#9aa0a6",
    PALE: "#3a4048",
    PAPER: "#16191d",
    UP: "#E69F00",
    DOWN: "#56B4E9",
    OTHER_COLOUR: "#2FBF95",
}
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
PANEL_GAP = 0.1  # of the figure's width
PANEL_WORDS, FRAME = 26, 80  # pixels: the words above a panel; what axis and legend take of a figure's height
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
NUMBERS = ("value", "low", "high")


def figure(traces: list, height: int, note: str, **layout):
    """A plotly figure in the house style.

    Parameters
    ----------
    traces : list of dict
        Made by `points` and `guide`.
    height : int
        Pixels on a wide screen.
    note : str
        How the marks are to be read; the page prints it under the caption.
    **layout
        Axes and whatever else the figure needs; ``meta`` may hold ``panels`` (their number), ``panel_rows``
        (how many stand below each other on a wide screen) and ``named_rows`` (how many rows have their name on
        the y axis).

    Returns
    -------
    plotly.graph_objects.Figure
    """
    import plotly.graph_objects as go

    meta = {"note": note, **layout.pop("meta", {})}
    house = {
        "height": height,
        "meta": meta,
        "autosize": True,
        "template": None,
        "margin": {"l": 10, "r": 14, "t": 34, "b": 10, "pad": 0},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": FONT, "size": 13, "color": INK},
        "hovermode": "closest",
        "dragmode": False,  # a finger that moves over a figure scrolls the page
        "hoverlabel": {"bgcolor": PAPER, "font": {"family": FONT, "size": 13, "color": INK}, "align": "left"},
        "showlegend": sum(bool(trace.get("showlegend")) for trace in traces) > 1,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1 + (PANEL_WORDS / (height - FRAME) if meta.get("panels", 1) > 1 else 0),
            "yanchor": "bottom",
            "itemclick": False,
            "itemdoubleclick": False,
        },
    }
    return go.Figure(data=traces, layout=house | layout)


def axis(title: str | None = None, **more) -> dict:
    """An axis in the house style, named where it has a name."""
    look = {
        "automargin": True,
        "fixedrange": True,
        "gridcolor": PALE,
        "zerolinecolor": GREY,
        "linecolor": GREY,
        "tickcolor": GREY,
        "exponentformat": "power",
        "showexponent": "all",
    }
    if title:
        look["title"] = {"text": escaped(title), "standoff": 8, "font": {"size": 13}}
    return look | more


def log_axis(ends: tuple[float, float], title: str | None = None, **more) -> dict:
    """A logarithmic axis from one number to another, with room at its right end."""
    low, high = (math.log10(end) for end in ends)
    decades = high - low
    # twos and fives are named where there are few powers of ten, every power where there is room for its name
    named = {"dtick": "D2"} if decades < 2.5 else {"dtick": 1} if decades < 7 else {}
    return axis(title, type="log", range=[low, high + 0.04 * decades + 0.02], **named, **more)


def points(lines: Sequence[dict], said: Callable[[dict], list[str]], kind: str = "scatter", **look) -> dict:
    """A trace with one point per line of a table.

    Parameters
    ----------
    lines : sequence of dict
        Rows of `numbered`.
    said : callable
        A row in words: the lines of its hover text.
    kind : str
        plotly's name of the trace.
    **look
        Where the points are and what they look like.
    """
    words = [said(line) for line in lines]
    return {
        "type": kind,
        "meta": {"rows": [line["row"] for line in lines]},
        "customdata": words,
        "hovertext": ["<br>".join([f"<b>{escaped(head)}</b>", *map(escaped, rest)]) for head, *rest in words],
        "hoverinfo": "text",
        "showlegend": False,
        "cliponaxis": False,
        **look,
    }


def key(name: str, **look) -> dict:
    """An entry of the legend; it has no point, so it looks the same whatever the first point looks like."""
    return {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip", "name": name, "showlegend": True, **look}


def guide(**look) -> dict:
    """A line that guides the eye and says nothing."""
    return {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False, **look}


def numbered(table: pl.DataFrame) -> list[dict]:
    """The rows of a table, each with its number under ``row``."""
    return [line | {"row": row} for row, line in enumerate(table.iter_rows(named=True))]


def basis(line: dict) -> str:
    """What a number rests on."""
    return f"{fmt.number(line['n_windows'])} windows, {fmt.number(line['n_tokens'])} scored tokens"


def quantity(name: str, line: dict, prefix: str = "", unit: str = tables.KL_UNIT) -> str:
    """A number with its interval and unit."""
    given = {key: line[prefix + key] for key in NUMBERS}
    return f"{name} {fmt.estimate(given)} {unit}".rstrip()


def escaped(text: object) -> str:
    """Text that plotly shows as it is and does not read as markup."""
    return html.escape(str(text), quote=False)


def whiskers(lines: Sequence[dict], colour: str, floor: float | None = None) -> tuple[list[float], dict]:
    """Where the values go, and their intervals as plotly's error bars.

    On a logarithmic axis (`floor` is its end) what is not above zero is put at the end.
    """

    def placed(number: float) -> float:
        return number if floor is None else max(number, floor)

    at = [placed(line["value"]) for line in lines]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [placed(line["high"]) - x for line, x in zip(lines, at, strict=True)],
        "arrayminus": [x - placed(line["low"]) for line, x in zip(lines, at, strict=True)],
        "color": colour,
        "thickness": 1.6,
        "width": 0,
    }
    return at, bars


def engine_look(engines: Sequence[str], engine: str, size: int = 9) -> dict:
    """Colour and shape of an engine's dots; colour alone would not tell them apart for everybody."""
    return {"color": colour_of(engine), "symbol": SYMBOLS[list(engines).index(engine) % len(SYMBOLS)], "size": size}


def panels(count: int) -> list[tuple[str, list[float]]]:
    """Axis suffix and horizontal domain of panels side by side; the page stacks them where it is narrow."""
    width = (1 - PANEL_GAP * (count - 1)) / count
    starts = [panel * (width + PANEL_GAP) for panel in range(count)]
    return [("" if panel == 0 else str(panel + 1), [at, at + width]) for panel, at in enumerate(starts)]


def panel_words(suffix: str, text: str, x: float, y: float, colour: str = INK, **more) -> dict:
    """Words at a place of a panel, given in parts of its width and height."""
    place = {"xref": f"x{suffix} domain", "yref": f"y{suffix} domain", "x": x, "y": y, "showarrow": False}
    return place | {"text": escaped(text), "font": {"color": colour, "size": 13}} | more

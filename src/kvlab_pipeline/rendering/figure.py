"""A figure as data: which marks stand where, in which colour, with which words. `svg` draws it, wide or narrow.

A study describes its figure once. What is drawn from the description is the SVG beside the findings and, in two
widths, the drawing inside the page, where the words of a mark are said when somebody points at it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Okabe and Ito's palette: told apart with every common kind of colour blindness.
INK, GREY, PALE, PAPER = "#222222", "#7a7a7a", "#d9d9d9", "#ffffff"
UP, DOWN, OTHER = "#d55e00", "#0072b2", "#009e73"
ENGINE_COLOURS = {"hf": DOWN, "vllm": UP}
# What a colour of the light theme becomes on the dark one. Marks keep a contrast of 3 to their ground, words 4.5.
DARK = {
    INK: "#e8e6e3",
    GREY: "#9aa0a6",
    PALE: "#3a4048",
    PAPER: "#16191d",
    UP: "#e69f00",
    DOWN: "#56b4e9",
    OTHER: "#2fbf95",
}
SHAPES = ("circle", "square", "diamond", "triangle")
LABEL_ROOM = 0.6  # of an axis, to the right of its marks, for the numbers that stand there


@dataclass(frozen=True)
class Look:
    """What a mark looks like.

    Parameters
    ----------
    colour : str
        One of the palette, so that it has a counterpart on the dark theme.
    shape : str
        Of a dot: ``circle``, ``square``, ``diamond``, ``triangle``, ``down``, ``star`` or ``plus``.
    size : float
        Of a dot, times the usual.
    open : bool
        Drawn as an outline.
    hatched : bool
        An open bar is hatched.
    """

    colour: str = INK
    shape: str = "circle"
    size: float = 1.0
    open: bool = False
    hatched: bool = False


@dataclass(frozen=True)
class Mark:
    """A value with its interval: a row of the figure's table.

    Parameters
    ----------
    row : int
        Which row, from 0.
    at : float
        Its place on the axis of places.
    value, low, high : float
        On the axis of values; of a bar they are counted from `start`. Without an interval all three are the value.
    words : tuple of str
        What the mark says: what it is, then its numbers.
    look : Look
    bar : float
        0 for a dot, otherwise the width of a bar in units of the axis of places.
    start : float
        Where a bar begins.
    label : str
        Written to the right of the mark.
    """

    row: int
    at: float
    value: float
    low: float
    high: float
    words: tuple[str, ...]
    look: Look = Look()
    bar: float = 0.0
    start: float = 0.0
    label: str = ""


@dataclass(frozen=True)
class Line:
    """A line that guides the eye: places, values, colour, width in points, and whether it is dashed."""

    places: tuple[float, ...]
    values: tuple[float, ...]
    colour: str = GREY
    width: float = 0.8
    dash: str = "solid"


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Parameters
    ----------
    ends : tuple of float
        Its first and last number. On a logarithmic axis what is not above zero stands at the first as an arrow.
    title : str
        What it shows, with its unit.
    log : bool
    names : tuple of str, optional
        Names of the places 0, 1, 2 and so on, the first on top.
    ticks : tuple of float
        The only numbers to be named; otherwise the drawing chooses them.
    form : str
        How numbers are named: ``plain``, ``whole`` or ``percent``.
    """

    ends: tuple[float, float]
    title: str = ""
    log: bool = False
    names: tuple[str, ...] | None = None
    ticks: tuple[float, ...] = ()
    form: str = "plain"


@dataclass(frozen=True)
class Panel:
    """One pair of axes and what stands between them.

    Parameters
    ----------
    places, values : Axis
        What the marks stand along, and what their values are read off.
    marks : tuple of Mark
    lines : tuple of Line
    bands : tuple of (float, float)
        Shaded stretches of the axis of places.
    notes : tuple of (str, str)
        Words in the upper left corner, a line each, and their colours.
    title : str
    across : bool
        Whether values run from left to right (places from the top down) and not from the bottom up.
    """

    places: Axis
    values: Axis
    marks: tuple[Mark, ...]
    lines: tuple[Line, ...] = ()
    bands: tuple[tuple[float, float], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    title: str = ""
    across: bool = False


@dataclass(frozen=True)
class LegendKey:
    """An entry of the legend: its words, its mark (None for none), and its line (its `places` are not read)."""

    text: str
    look: Look | None = None
    line: Line | None = None


@dataclass(frozen=True)
class Figure:
    """A figure.

    Parameters
    ----------
    title : str
        What is to be seen.
    note : str
        How the marks are to be read.
    panels : tuple of Panel
        Row by row from the top.
    columns : int
        Panels in a row, where there is room.
    keys : tuple of LegendKey
        The legend.
    height : float
        Points of a row of panels, or of each named place in it.
    """

    title: str
    note: str
    panels: tuple[Panel, ...]
    columns: int = 1
    keys: tuple[LegendKey, ...] = ()
    height: float = 175.0

    @property
    def marks(self) -> list[Mark]:
        """All marks, panel by panel."""
        return [mark for panel in self.panels for mark in panel.marks]


def colour_of(engine: str) -> str:
    """An engine keeps its colour in all figures."""
    return ENGINE_COLOURS.get(engine, OTHER)


def shape_of(order: int) -> str:
    """A shape for each of a few things to be told apart."""
    return SHAPES[order % len(SHAPES)]


def beside(order: int, count: int, room: float = 0.7) -> float:
    """How far from their common place the mark of one of `count` series stands."""
    return room * (order - (count - 1) / 2) / count


def log_ends(lines: Iterable[dict]) -> tuple[float, float]:
    """The ends of a logarithmic axis: below every positive value, where zeros are put, and above every interval.

    An interval that reaches down to zero, or far below all values, does not stretch the axis.
    """
    lines = list(lines)
    positive = [x for line in lines for x in (line["value"], line["low"], line["high"]) if x > 0] or [1e-12, 1.0]
    centres = [line["value"] for line in lines if line["value"] > 0] or positive
    low, high = max(min(positive), min(centres) / 100), max(positive)
    spread = max(2.0, (high / low) ** 0.06)
    return low / spread, high * min(spread, 1.3)


def log_axis(lines: Iterable[dict], title: str = "", labelled: bool = False, room: float = 1.0) -> Axis:
    """A logarithmic axis over the rows of a table, ``value``, ``low`` and ``high``.

    `labelled` leaves room for a number to the right of every mark; `room` multiplies the upper end.
    """
    low, high = log_ends(lines)
    return Axis((low, high * room * ((high / low) ** LABEL_ROOM if labelled else 1.0)), title, log=True)


def linear_axis(numbers: Iterable[float], title: str = "", labelled: bool = False, form: str = "plain") -> Axis:
    """A linear axis over some numbers and zero, with a margin on every side that is not zero."""
    numbers = [0.0, *numbers]
    low, high = min(numbers), max(numbers)
    reach = (high - low) or 1.0
    ends = (low - 0.05 * reach if low < 0 else 0.0, high + (LABEL_ROOM if labelled else 0.05) * reach)
    return Axis(ends, title, form=form)


def named_axis(names: Iterable[str]) -> Axis:
    """Places by name, the first on top."""
    names = tuple(names)
    return Axis((-0.6, len(names) - 0.4), names=names)


def whole_axis(numbers: Iterable[int], title: str = "") -> Axis:
    """Places at whole numbers, with half a place of room at both ends."""
    numbers = list(numbers)
    return Axis((min(numbers) - 0.6, max(numbers) + 0.6), title, form="whole")

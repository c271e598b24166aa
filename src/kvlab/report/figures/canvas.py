"""What the figures share: the house style, and the parts that more than one of them draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl

from kvlab.report import format as fmt

WIDTH = 7.3  # inches at 72 dpi; a browser shows the SVG about 700 px wide
# Okabe and Ito's palette: told apart with every common kind of colour blindness.
INK, GREY, PALE = "#222222", "#7a7a7a", "#d9d9d9"
UP, DOWN = "#D55E00", "#0072B2"
ENGINE_COLOURS = {"hf": "#0072B2", "vllm": "#D55E00"}
OTHER_COLOUR = "#009E73"
STYLE = {
    "svg.hashsalt": "kvlab",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is there on every machine
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "hatch.linewidth": 0.6,
}


def styled(draw: Callable) -> Callable:
    """Run a drawing function under the house style."""

    def inside(table: pl.DataFrame):
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(table)

    inside.__doc__, inside.__name__ = draw.__doc__, draw.__name__
    return inside


def save(figure, path: Path, kind: str = "svg") -> None:
    """Save a matplotlib figure without date or program name."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None, "Creator": None} if kind == "svg" else None
        figure.savefig(path, format=kind, metadata=metadata, dpi=96)


@styled
def sentence(table: pl.DataFrame):
    """A picture that says why there is none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8))
    figure.text(0.02, 0.5, table["not_drawn"][0], va="center", color=GREY)
    return figure


def canvas(height: float, panels: int = 1, share: bool = False):
    """A figure of the house width and its axes, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, panels, sharex=share, sharey=True, squeeze=False)[0]
    return figure, list(axes)


def title(figure, text: str) -> None:
    """What is to be seen, flush left above everything."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=10.5, fontweight="bold")


def colour_of(engine: str) -> str:
    """An engine keeps its colour in all figures."""
    return ENGINE_COLOURS.get(engine, OTHER_COLOUR)


def legend(axis, engines: list[str]) -> None:
    """Engine names in their colours, in place of a legend; none when there is nothing to tell apart."""
    if len(engines) < 2:
        return
    for order, engine in enumerate(engines):
        axis.text(
            0.01 + 0.09 * order,
            1.0,
            engine,
            transform=axis.transAxes,
            color=colour_of(engine),
            va="bottom",
            fontweight="bold",
        )


def rows_axis(axis, names: list[str]) -> None:
    """Name the rows, first on top, with faint guides."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="x", color=PALE, linewidth=0.5)
    axis.tick_params(axis="y", length=0, pad=8)


def log_axis(axis, table: pl.DataFrame, labelled: bool = False) -> float:
    """Make x logarithmic over the positive values; returns its left end, where zeros are put.

    `labelled` leaves room for a number to the right of every dot.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    floor, high = log_ends(table)
    ratio = high / floor
    axis.set_xscale("log")
    axis.set_xlim(floor, high * (ratio**0.5 if labelled else 1.3))
    if ratio < 300:  # too few powers of ten to read a value by
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    return floor


def log_ends(table: pl.DataFrame) -> tuple[float, float]:
    """The left end of a logarithmic axis, where zeros are put, and the largest number on it."""
    positive = [x for name in ("value", "low", "high") for x in table[name] if x > 0] or [1e-12, 1.0]
    centres = [x for x in table["value"] if x > 0] or positive
    low, high = max(min(positive), min(centres) / 100), max(positive)
    return low / max(2.0, (high / low) ** 0.06), high


def dot(axis, row: float, line: dict, colour: str, floor: float, label: bool = False) -> None:
    """A value with its interval; one that is not above zero is an arrow at the left end, with its number."""
    low, high = max(line["low"], floor), max(line["high"], floor)
    axis.plot([low, high], [row, row], color=colour, linewidth=1.4, solid_capstyle="butt")
    above = line["value"] > 0
    axis.plot(
        line["value"] if above else floor,
        row,
        "o" if above else "<",
        color=colour,
        markersize=5.5,
        clip_on=False,
    )
    if label or not above:
        axis.annotate(
            fmt.estimate(line),
            (max(high, floor), row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )


def interval(given: dict) -> dict:
    """An Estimate's three numbers as floats and what they rest on, for a table's row."""
    numbers = {key: float(given[key]) for key in ("value", "low", "high")}
    return numbers | {key: int(given[key]) for key in ("n_windows", "n_tokens")}

"""What stands around a panel: ends, ticks and their names, grid, title."""

from __future__ import annotations

import math
import textwrap

from kvlab.output import format as fmt
from kvlab_pipeline.pages.figure import GREY, INK, PALE, Axis, Panel

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NAME_LETTERS = {False: 36, True: 46}  # of a row's name in a line; where it is narrow it stands above its row
TITLE_LETTERS = {False: 70, True: 38}  # of an axis's title in a line


def head_room(title: str, legend_rows: int) -> float:
    """Points above the panels."""
    return 15 * (title.count("\n") + 1 if title else 0) + 15 * legend_rows + 6


def dress(axis, panel: Panel, narrow: bool, left: Panel | None, below: Panel | None) -> None:
    """Give a panel its axes; one that is its neighbour's is not named again."""
    across, upward = (panel.values, panel.places) if panel.across else (panel.places, panel.values)
    axis.grid(axis="x" if panel.across else "y", color=PALE, linewidth=0.5)
    axis.set_title(panel.title, fontsize=9, color=GREY, loc="right", pad=5)
    one_axis(axis, "x", across, narrow, hidden=below is not None and of(below, "x") == across)
    one_axis(axis, "y", upward, narrow, hidden=left is not None and of(left, "y") == upward)
    if panel.places.names is not None:
        row_names(axis, panel.places, narrow)
    if not panel.values.log and panel.values.ends[0] <= 0 <= panel.values.ends[1]:
        (axis.axvline if panel.across else axis.axhline)(0, color=GREY, linewidth=0.8, zorder=1)


def of(panel: Panel, which: str) -> Axis:
    """A panel's axis by its direction."""
    return panel.values if panel.across == (which == "x") else panel.places


def one_axis(axis, which: str, given: Axis, narrow: bool, hidden: bool) -> None:
    """Ends, ticks and title of one axis."""
    drawn = getattr(axis, f"{which}axis")
    if given.log:
        getattr(axis, f"set_{which}scale")("log")
    ends = given.ends[::-1] if given.names is not None and which == "y" else given.ends
    getattr(axis, f"set_{which}lim")(*ends)
    if given.names is not None:
        return
    ticks(drawn, given, 6 if which == "x" else 8)
    axis.tick_params(axis=which, labelsize=8.5, colors=GREY, labelcolor=INK)
    if hidden:
        axis.tick_params(axis=which, **{"labelbottom" if which == "x" else "labelleft": False})
    else:
        getattr(axis, f"set_{which}label")(textwrap.fill(given.title, TITLE_LETTERS[narrow]))


def ticks(drawn, given: Axis, most: int) -> None:
    """Where the ticks stand and what they are called."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    if given.ticks:
        drawn.set_major_locator(FixedLocator(given.ticks))
    elif given.log:
        spread = given.ends[1] / given.ends[0]
        subs = tuple(range(1, 10)) if spread < 6 else (1, 2, 5) if spread < 300 else (1,)
        drawn.set_major_locator(LogLocator(subs=subs, numticks=most + 2))
    else:
        drawn.set_major_locator(MaxNLocator(nbins=most, integer=given.form == "whole", steps=[1, 2, 2.5, 5, 10]))
    drawn.set_minor_locator(NullLocator())
    drawn.set_major_formatter(lambda value, _: tick_name(value, given.form))


def tick_name(value: float, form: str = "plain") -> str:
    """A number on an axis; a very small or large one as a power of ten."""
    if form == "percent":
        return f"{100 * value:g} %"
    if value == 0 or form == "whole" or fmt.SMALL <= abs(value) < fmt.LARGE:
        return f"{value:g}"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    mantissa = f"{value / 10.0**power:.3g}"
    ten = f"10{str(power).translate(SUPERSCRIPTS)}"
    return ten if mantissa == "1" else f"{mantissa}·{ten}"


def row_names(axis, places: Axis, narrow: bool) -> None:
    """Name the rows, in front of them or, where it is narrow, above them."""
    names = [
        "\n".join(part for line in name.split("\n") for part in textwrap.wrap(line, NAME_LETTERS[narrow]))
        for name in places.names
    ]
    axis.tick_params(axis="y", length=0, pad=8, labelsize=8.5)
    axis.set_yticks(range(len(names)), [""] * len(names) if narrow else names)
    if narrow:
        for row, name in enumerate(names):
            place = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points", "va": "bottom"}
            axis.annotate(name.replace("\n", " "), (0, row - 0.3), (3, 0), fontsize=8.5, color=INK, **place)
        axis.set_ylim(len(names) - 0.55, -0.85)

"""Draws a figure's description with matplotlib: as a file of its own, and inside a page in two widths.

The file holds its letters as paths (it looks the same everywhere), no date, and fixed ids (a rerun is byte for byte
the same). Inside a page the letters are text, every colour is a variable of the page's theme, and every mark names
its row in ``data-row``, so that the page can say its words; nothing in it runs and nothing is fetched.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from pathlib import Path

from kvlab.core.errors import Fault
from kvlab.output import format as fmt
from kvlab_pipeline.rendering.figure import DARK, GREY, INK, PALE, PAPER, Axis, Figure, LegendKey, Look, Mark, Panel

WIDE, NARROW = 525.6, 252.0  # points; 700 and 336 pixels of a browser
LETTER, HEAD = 5.2, 6.4  # points that a letter takes on average, of the text and of the title
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "down": "v",
    "left": "<",
    "star": "*",
    "plus": "P",
}
SIZE = 5.5  # points across a dot
MARGIN = 5.0  # points around every panel
STYLE = {
    "svg.hashsalt": "kvlab",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is there on every machine
    "font.size": 9,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
}


def write(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG file, without date or program name."""
    Path(path).write_bytes(rendered(figure, WIDE, titled=True))


def sentence(text: str, path: Path) -> None:
    """Write a picture that says why there is none."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(WIDE / 72, 0.8))
        canvas.text(0.02, 0.5, text, va="center", color=GREY)
        Path(path).write_bytes(saved(canvas))


def inline(figure: Figure, name: str, width: float) -> str:
    """A figure as an ``svg`` element for a page.

    Parameters
    ----------
    figure : Figure
    name : str
        Stands before every id, so that several figures can stand in one page.
    width : float
        `WIDE` or `NARROW`, points; the page may scale it.
    """
    text = rendered(figure, width, titled=False, **{"svg.fonttype": "none", "figure.facecolor": "none"}).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', text, count=1)
    return themed(named(text, name))


def rendered(figure: Figure, width: float, titled: bool, **style) -> bytes:
    """A figure as SVG."""
    import matplotlib

    with matplotlib.rc_context(STYLE | style):
        return saved(draw(figure, width, titled))


def saved(canvas) -> bytes:
    """A matplotlib figure as SVG."""
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def named(text: str, name: str) -> str:
    """Ids that are used get a prefix, those of rows become ``data-row``, the rest goes."""
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="row-(\d+)"', r' data-row="\1"', text)
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", text)
    return re.sub(r'(href="#|url\(#)', rf"\1{name}-", text)


def themed(text: str) -> str:
    """Colours as variables of the page, and the page's letters.

    Raises
    ------
    Fault
        When a colour has no counterpart on the dark theme.
    """
    unknown = set(re.findall(r"#[0-9a-f]{6}\b", text)) - DARK.keys()
    if unknown:
        raise Fault(
            f"a figure has colours without a counterpart on the dark theme: {', '.join(sorted(unknown))}",
            code="fault.no-dark-colour",
        )
    text = re.sub(r"#([0-9a-f]{6})\b", r"var(--c-\1)", text)
    return text.replace("'DejaVu Sans'", "var(--letters)")


# ----------------------------------------------------------------------------------------- drawing


def draw(figure: Figure, width: float, titled: bool):
    """A figure as matplotlib's, to be called under `STYLE`; where it is narrow its panels stand below each other."""
    from matplotlib.figure import Figure as Canvas

    narrow = width < WIDE
    columns = 1 if narrow else figure.columns
    rows = [figure.panels[start : start + columns] for start in range(0, len(figure.panels), columns)]
    heights = [max(panel_height(panel, figure.height, narrow) for panel in row) for row in rows]
    title = textwrap.fill(figure.title, int(width / HEAD)) if titled else ""
    head = head_room(title, legend_rows(figure.keys, width))
    canvas = Canvas(figsize=(width / 72, (sum(heights) + head) / 72), layout="constrained")
    canvas.get_layout_engine().set(w_pad=MARGIN / 72, h_pad=MARGIN / 72)
    axes = canvas.subplots(len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    for number, axis in enumerate(axes.flat):
        if number >= len(figure.panels):
            axis.set_axis_off()
            continue
        shown = figure.panels[number]
        left = figure.panels[number - 1] if number % columns else None
        below = figure.panels[number + columns] if number + columns < len(figure.panels) else None
        one_panel(axis, shown)
        dress(axis, shown, narrow, left, below)
    head_of(canvas, title, figure.keys, width)
    return canvas


def panel_height(panel: Panel, height: float, narrow: bool) -> float:
    """Points that a panel takes with its axis; where it is narrow, names stand above their row."""
    if panel.places.names is None:
        return height * (0.9 if narrow else 1.0)
    return 50 + (height + (14 if narrow else 0)) * max(1.5, len(panel.places.names))


def one_panel(axis, panel: Panel) -> None:
    """What stands between a panel's axes."""
    for low, high in panel.bands:
        axis.axvspan(low, high, color=PALE, alpha=0.45, linewidth=0)
    for line in panel.lines:
        path = (line.values, line.places) if panel.across else (line.places, line.values)
        axis.plot(*path, color=line.colour, linewidth=line.width, linestyle=line.dash, zorder=1.5)
    for mark in panel.marks:
        (one_bar if mark.bar else one_dot)(axis, mark, panel)
    for order, (text, colour) in enumerate(panel.notes):
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top", "zorder": 6}
        axis.annotate(text, (0.0, 1.0), (4, -2 - 11 * order), color=colour, fontsize=8, **place)


def one_dot(axis, mark: Mark, panel: Panel) -> None:
    """A value with its interval; on a logarithmic axis one that is not above zero is an arrow at its first end."""
    floor = panel.values.ends[0] if panel.values.log else None
    value, low, high = (x if floor is None else max(x, floor) for x in (mark.value, mark.low, mark.high))
    whisker(axis, mark, panel, low, high)
    look, shape = mark.look, mark.look.shape
    if floor is not None and mark.value <= 0:
        shape = "left" if panel.across else "down"
    place = (value, mark.at) if panel.across else (mark.at, value)
    axis.plot(*place, gid=f"row-{mark.row}", clip_on=False, zorder=3, **outline(look, shape))
    label(axis, mark, panel, high)


def outline(look: Look, shape: str) -> dict:
    """matplotlib's words for a dot."""
    size = SIZE * look.size * (1.5 if shape == "star" else 0.9 if shape == "diamond" else 1.0)
    return {
        "marker": MARKERS[shape],
        "color": look.colour,
        "linestyle": "",
        "markersize": size,
        "markeredgewidth": 1.2,
        "markerfacecolor": PAPER if look.open else look.colour,
    }


def one_bar(axis, mark: Mark, panel: Panel) -> None:
    """A bar with its interval; `hatched` where it is open and says so."""
    look = mark.look
    filled = {
        "color": PAPER if look.open else look.colour,
        "edgecolor": look.colour,
        "linewidth": 1,
        "hatch": "////" if look.hatched else None,
        "gid": f"row-{mark.row}",
        "zorder": 2,
    }
    if panel.across:
        axis.barh(mark.at, mark.value, mark.bar, left=mark.start, **filled)
    else:
        axis.bar(mark.at, mark.value, mark.bar, bottom=mark.start, **filled)
    low, high = mark.start + mark.low, mark.start + mark.high
    whisker(axis, mark, panel, low, high, INK, 3)
    label(axis, mark, panel, max(high, mark.start, mark.start + mark.value))


def whisker(axis, mark: Mark, panel: Panel, low: float, high: float, colour: str = "", order: float = 2.5) -> None:
    """An interval; none where it has no width."""
    if mark.low == mark.high:
        return
    ends, place = (low, high), (mark.at, mark.at)
    path = (ends, place) if panel.across else (place, ends)
    look = {"linewidth": 1.3 * max(0.9, mark.look.size), "solid_capstyle": "butt", "zorder": order}
    axis.plot(*path, color=colour or mark.look.colour, gid=f"row-{mark.row}", **look)


def label(axis, mark: Mark, panel: Panel, reach: float) -> None:
    """A mark's number to the right of all that was drawn of it."""
    if mark.label:
        place = (reach, mark.at) if panel.across else (mark.at, reach)
        look = {"va": "center", "fontsize": 8, "color": INK, "zorder": 4}
        axis.annotate(mark.label, place, (7, 0), textcoords="offset points", **look)


# -------------------------------------------------------------------------------- title and legend


def head_of(canvas, title: str, keys: tuple[LegendKey, ...], width: float) -> None:
    """Title and legend, flush left above everything."""
    from matplotlib.lines import Line2D

    handles = []
    for key in keys:
        look = outline(key.look, key.look.shape) if key.look else {"color": key.line.colour, "marker": ""}
        if key.line:
            look |= {"linestyle": key.line.dash, "linewidth": key.line.width}
        handles.append(Line2D([], [], label=key.text, **look))
    if not handles and not title:
        return
    canvas.legend(
        handles=handles,
        title=title or None,
        title_fontproperties={"size": 10.5, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=legend_columns(keys, width) or 1,
        frameon=False,
        borderaxespad=0.3,
        columnspacing=1.4,
        handletextpad=0.5,
    )


def legend_columns(keys: tuple[LegendKey, ...], width: float) -> int:
    """How many entries of the legend stand in a row."""
    widest = max((34 + LETTER * len(key.text) for key in keys), default=width)
    return max(1, min(len(keys), int(width / widest)))


def legend_rows(keys: tuple[LegendKey, ...], width: float) -> int:
    """How many rows the legend takes."""
    return -(-len(keys) // legend_columns(keys, width)) if keys else 0


# What stands around a panel: ends, ticks and their names, grid, title.

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

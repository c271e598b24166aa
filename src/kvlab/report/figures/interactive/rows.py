"""Values with intervals on a logarithmic axis, a row each: most figures of the report."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from kvlab.report.figures.canvas import GREY, log_ends
from kvlab.report.figures.interactive import marks

ROW, HEAD = 40, 110  # pixels


def by_row(
    table: pl.DataFrame,
    name: Callable[[dict], str],
    said: Callable[[dict], list[str]],
    title: str,
    note: str,
    group: str = "engine",
):
    """Dots with intervals, one row per name; rows of the same name in different groups share a line.

    Parameters
    ----------
    table : polars.DataFrame
        At least ``value``, ``low``, ``high``, ``n_windows``, ``n_tokens`` and the column `group`.
    name : callable
        A row's name on the axis.
    said : callable
        The lines of its hover text.
    title : str
        What the axis shows, with its unit.
    note : str
        How the marks are to be read.
    group : str
        The column whose values get a colour and a shape each: engines in the colours of all figures.
    """
    lines = marks.numbered(table)
    names = list(dict.fromkeys(map(name, lines)))
    groups = list(dict.fromkeys(line[group] for line in lines))
    shared = len(names) < len(lines)
    ends = log_ends(table)
    traces = []
    for order, one in enumerate(groups):
        mine = [line for line in lines if line[group] == one]
        shift = 0.26 * (order - (len(groups) - 1) / 2) if shared else 0.0
        traces.append(marks.key(one, mode="markers", marker=marks.engine_look(groups, one)))
        traces.append(dots(mine, [names.index(name(line)) + shift for line in mine], said, groups, one, ends[0]))
    rows = marks.axis(
        range=[len(names) - 0.4, -0.6],
        tickvals=list(range(len(names))),
        ticktext=list(map(marks.escaped, names)),
        showgrid=True,
        zeroline=False,
        ticklen=0,
    )
    across = marks.log_axis((ends[0], ends[1] * 1.2), title, linecolor=GREY, showline=True)
    meta = {"named_rows": len(names)}
    return marks.figure(traces, HEAD + ROW * len(names), note, xaxis=across, yaxis=rows, meta=meta)


def dots(lines: list[dict], heights: list[float], said, groups: list[str], group: str, floor: float) -> dict:
    """One group's dots; a value that is not above zero is an arrow at the left end."""
    look = marks.engine_look(groups, group)
    at, bars = marks.whiskers(lines, look["color"], floor)
    look["symbol"] = [look["symbol"] if line["value"] > 0 else "triangle-left" for line in lines]
    return marks.points(lines, said, x=at, y=heights, error_x=bars, marker=look, mode="markers", name=group)

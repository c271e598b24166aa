"""Interactive: KL against bytes, spent uniformly or on favoured layers."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import INK, colour_of, log_ends
from kvlab.report.figures.interactive import marks
from kvlab.report.figures.mitigations import MARKS, curve_of, is_open, smaller
from kvlab.report.tables import parts as tables

HEIGHT = 460  # pixels


def interactive_mitigations(table: pl.DataFrame):
    """KL on a logarithmic axis over bits per value, a panel per protocol, engines by colour, arms by mark."""
    lines = marks.numbered(table)
    protocols, engines, kinds = (
        list(dict.fromkeys(line[key] for line in lines)) for key in ("protocol", "engine", "kind")
    )
    ends = log_ends(table)
    low, high = table["bits_per_value"].min(), table["bits_per_value"].max()
    room = 0.06 * (high - low) or 1.0
    traces = [
        marks.key(engine, mode="lines", line={"color": colour_of(engine), "width": 2})
        for engine in engines
        if len(engines) > 1
    ]
    traces += [marks.key(MARKS[kind][2], mode="markers", marker=look(kind, INK)) for kind in kinds]
    axes, said = {}, []
    for protocol, (suffix, across) in zip(protocols, marks.panels(len(protocols)), strict=True):
        place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        for engine in engines:
            mine = [line for line in lines if (line["protocol"], line["engine"]) == (protocol, engine)]
            traces += one_engine(mine, engine, smaller(engines, engine), ends[0], place)
        axes[f"xaxis{suffix}"] = marks.axis(
            "bits per value of the whole cache",
            domain=across,
            anchor=f"y{suffix}",
            showline=True,
            zeroline=False,
            range=[low - room, high + room],
        )
        axes[f"yaxis{suffix}"] = marks.log_axis(ends, f"KL, {tables.KL_UNIT}", anchor=f"x{suffix}", showline=True)
        if suffix:
            axes[f"yaxis{suffix}"] |= {"title": None}
        said.append(marks.panel_words(suffix, protocol, 1, 1, xanchor="right", yanchor="bottom"))
    note = (
        "The line is uniform spending on the studied codec; between its points it is read as it is drawn. "
        "A mark below the line spends its bytes better, one above it worse. Marks of klt are open."
    )
    return marks.figure(traces, HEIGHT, note, annotations=said, meta={"panels": len(protocols)}, **axes)


def one_engine(lines: list[dict], engine: str, scale: float, floor: float, place: dict) -> list[dict]:
    """One engine's curve and arms in one panel."""
    if not lines:
        return []
    colour = colour_of(engine)
    at, bars = marks.whiskers(lines, colour, floor)
    looks = [look(line["kind"], colour, scale) for line in lines]
    marker = {key: [one[key] for one in looks] for key in ("color", "symbol", "size")} | {"line": looks[0]["line"]}
    x = [line["bits_per_value"] for line in lines]
    drawn = marks.points(lines, words, x=x, y=at, error_y=bars, marker=marker, mode="markers", name=engine, **place)
    curve = [line for line in curve_of(lines) if line["value"] > 0]
    ends = {"x": [line["bits_per_value"] for line in curve], "y": [line["value"] for line in curve]}
    return [marks.guide(**ends, line={"color": colour, "width": 1.6 * scale}, **place), drawn]


def look(kind: str, colour: str, scale: float = 1.0) -> dict:
    """An arm's mark."""
    face = marks.PAPER if is_open(kind) else colour
    size = scale * (7 if kind == "uniform" else 10)
    return {"color": face, "symbol": MARKS[kind][1], "size": size, "line": {"color": colour, "width": 1.6}}


def words(line: dict) -> list[str]:
    """A point's hover text."""
    favoured = [] if line["layers"] == "none" else [f"layers {line['layers']}"]
    return [
        MARKS[line["kind"]][2] if line["kind"] != "uniform" else line["arm"],
        *favoured,
        f"{line['engine']}, {line['protocol']}",
        f"{fmt.number(line['bits_per_value'], 4)} bits per value",
        marks.quantity("KL", line),
        marks.basis(line),
    ]

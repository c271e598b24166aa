"""What each layer's K and V cost, alone and left out, and which of them can be told from zero."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.pages import marks
from kvlab_pipeline.pages.figure import (
    Axis,
    Figure,
    Key,
    Look,
    Mark,
    Panel,
    beside,
    colour_of,
    linear_axis,
    shape_of,
    whole_axis,
)
from kvlab_pipeline.pages.parts import KL_UNIT
from kvlab_pipeline.studies.layers.tables import KINDS, NAMES

FEW = 12  # layers; of more, the marks are smaller
PLACE = ("engine", "protocol", "stream", "kind", "layer", "boundary")


def layers_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, protocol, stream, kind and layer: net KL and its q-value; `clear` marks discoveries."""
    alpha = round(1 - metrics["sizes"]["confidence"], 9)
    rows = [
        {key: row[key] for key in PLACE}
        | marks.interval(row["kl"])
        | {"q_value": row["q_value"], "clear": row["q_value"] is not None and row["q_value"] <= alpha}
        for row in metrics.get("layers") or []
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def layers(table: pl.DataFrame) -> Figure:
    """Net KL by layer: a row of panels per kind, a column per stream, an open mark where q is too large."""
    lines = marks.numbered(table)
    kinds, streams, engines, protocols = marks.each(lines, "kind", "stream", "engine", "protocol")
    series = [(engine, protocol) for engine in engines for protocol in protocols]
    places = whole_axis(table["layer"], "layer")
    panels = []
    for kind in kinds:
        mine = [line for line in lines if line["kind"] == kind]
        values = linear_axis((line[key] for line in mine for key in ("value", "low", "high")), f"KL, {KL_UNIT}")
        panels += [panel([line for line in mine if line["stream"] == one], series, places, values) for one in streams]
    keys = [Key(", ".join(one), look(series, one)) for one in series] if len(series) > 1 else []
    return Figure(
        "What each layer costs, coded alone or left out",
        "An open mark is a layer that is not told from zero after the correction for looking at many layers; "
        "boundary layers are shaded.",
        tuple(panels),
        columns=len(streams),
        keys=tuple(keys),
    )


def panel(lines: list[dict], series: list[tuple[str, str]], places: Axis, values: Axis) -> Panel:
    """One stream and kind: engines by colour, protocols by shape, side by side within a layer."""
    many = len({line["layer"] for line in lines}) > FEW
    drawn = tuple(layer_mark(line, series, 0.5 if many else 0.9) for line in lines)
    shaded = sorted({line["layer"] for line in lines if line["boundary"]})
    title = f"{NAMES[lines[0]['stream']]} {KINDS[lines[0]['kind']]}" if lines else ""
    return Panel(places, values, drawn, bands=tuple((one - 0.5, one + 0.5) for one in shaded), title=title)


def layer_mark(line: dict, series: list[tuple[str, str]], size: float) -> Mark:
    """One layer's cost with its interval."""
    one = (line["engine"], line["protocol"])
    at = line["layer"] + beside(series.index(one), len(series))
    return marks.mark(line, at, words(line), look(series, one, size=size, open=not line["clear"]))


def look(series: list[tuple[str, str]], one: tuple[str, str], **more) -> Look:
    """Engines by colour, protocols by shape."""
    protocols = list(dict.fromkeys(protocol for _, protocol in series))
    return Look(colour_of(one[0]), shape_of(protocols.index(one[1])), **more)


def words(line: dict) -> list[str]:
    """What a layer's mark says."""
    clear = "clear of zero" if line["clear"] else "not told from zero"
    boundary = ", a boundary layer" if line["boundary"] else ""
    return [
        f"{NAMES[line['stream']]} of layer {fmt.number(line['layer'])} {KINDS[line['kind']]}{boundary}",
        f"{line['engine']}, {line['protocol']}",
        marks.quantity("KL", line),
        f"q-value {fmt.number(line['q_value'])}, {clear}",
        marks.basis(line),
    ]

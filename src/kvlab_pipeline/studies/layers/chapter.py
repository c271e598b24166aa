"""The layers in the report: what each costs, and whether they add up."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks, tables
from kvlab_pipeline.rendering.figure import (
    Axis,
    Figure,
    LegendKey,
    Look,
    Mark,
    Panel,
    beside,
    colour_of,
    linear_axis,
    shape_of,
    whole_axis,
)
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.layers.numbers import PARTS, additivity_entries, layer_entries

# What each layer's K and V cost, alone and left out, and which of them can be told from zero.

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
    keys = [LegendKey(", ".join(one), look(series, one)) for one in series] if len(series) > 1 else []
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


# Whether the costs of layers and of streams add up, from the part ``additivity`` of ``metrics.json``.


def claims(additivity: list[dict]) -> list[dict]:
    """Whether layers add up, stream by stream, and whether K and V do, under every engine and protocol."""
    return [found for row in additivity if (found := (together if row["parts"] == "streams" else compounding)(row))]


def together(row: dict) -> dict:
    """The claim that coding K and V together costs, or does not, what either costs alone."""
    return claim(
        "layers",
        f"Coding K and V together in all layers {place(row)}",
        row["interaction"],
        row["compared"],
        up="raises KL beyond the sum of either alone",
        down="keeps KL below the sum of either alone",
    )


def compounding(row: dict) -> dict | None:
    """The claim that the cost of all layers is, or is not, the sum of the layers' own; None without a ratio to say."""
    several = len(row["compared"][1]) > 1
    if not row["ratio"] or not several:
        return None
    subject = f"Coding {NAMES[row['stream']]} in all layers {place(row)}"
    unit = "times the sum of its layers coded alone"
    how = {"up": "raises KL", "down": "raises KL only", "null": 1.0, "unit": unit}
    return claim("layers", subject, row["ratio"], row["compared"], **how)


def place(row: dict) -> str:
    """Where a row was measured."""
    return f"(`{row['engine']}`, `{row['protocol']}`)"


def entries(measured: ChapterInputs) -> dict:
    """Its parts of ``metrics.json``."""
    given = (measured.params, measured.results, measured.boot)
    return {"layers": layer_entries(*given), "additivity": additivity_entries(*given)}


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of layers."""
    return [
        ("layers alone and left out, KL", estimates_of(metrics, "layers", "kl")),
        ("layers together minus sum, KL", estimates_of(metrics, "additivity", "interaction")),
    ]


# ---------------------------------------------------------------------------------------------- tables

MARK = "†"  # put after what is told from zero after the correction for many layers
APART = "‡"  # put after what is told from the mean of the layers, after the same correction
KINDS = {"only": "alone", "but": "left out"}
PRICED = {"k": "each layer's K", "v": "each layer's V", "kv": "K and V of each layer at once"}
NAMES = {"k": "K", "v": "V", "kv": "K and V"}


def by_place(rows: list[dict], alpha: float) -> list[dict]:
    """One table per engine and protocol: ``[{"engine", "protocol", "table"}]``."""
    places = dict.fromkeys((row["engine"], row["protocol"]) for row in rows)
    return [
        {
            "engine": engine,
            "protocol": protocol,
            "table": costs([row for row in rows if (row["engine"], row["protocol"]) == (engine, protocol)], alpha),
        }
        for engine, protocol in places
    ]


def costs(rows: list[dict], alpha: float) -> str:
    """One line per layer: what its K and its V cost alone, and left out."""
    found = {(row["layer"], row["kind"], row["stream"]): row for row in rows}
    columns = list(dict.fromkeys((kind, row["stream"]) for kind in KINDS for row in rows if row["kind"] == kind))
    boundary = {row["layer"]: row["boundary"] for row in rows}
    lines = [
        [named(layer, boundary[layer]), *(cost(found.get((layer, *column)), alpha) for column in columns)]
        for layer in sorted(boundary)
    ]
    return fmt.table(["layer", *(f"{NAMES[stream]} {KINDS[kind]}" for kind, stream in columns)], lines)


def named(layer: int, boundary: bool) -> str:
    """A layer's number, boundary layers named."""
    return f"{layer}, boundary" if boundary else str(layer)


def cost(row: dict | None, alpha: float) -> str:
    """A layer's cost, marked when it is told from zero, and when it is told from the mean of the layers."""
    if row is None:
        return fmt.DASH
    tested = {MARK: row["q_value"], APART: row["q_stands_out"]}
    marks = [mark for mark, q in tested.items() if q is not None and q <= alpha]
    return " ".join([fmt.estimate(row["kl"]), *marks])


def additivity(rows: list[dict]) -> str:
    """What is coded together against the sum of its parts."""
    columns = {
        "engine": tables.code("engine"),
        "protocol": tables.code("protocol"),
        "parts": lambda row: ("" if row["parts"] == "streams" else "the layers of ") + NAMES[row["stream"]],
        "together": tables.estimate("joint"),
        "alone, added up": tables.estimate("sum"),
        "left out, added up": tables.estimate("left_out_sum"),
        "ratio to alone": tables.estimate("ratio"),
        "together minus alone": tables.estimate("interaction"),
        "reading": tables.effect("interaction"),
    }
    return tables.table(rows, columns)


def boundary(rows: list[dict]) -> str | None:
    """What a boundary layer costs beside another; None where no layer is one, or all are."""
    columns = {
        "engine": tables.code("engine"),
        "protocol": tables.code("protocol"),
        "stream": lambda row: NAMES[row["stream"]],
        f"boundary minus other layer, {KL_UNIT}": tables.estimate("boundary_excess", signed=True),
        "reading": tables.effect("boundary_excess"),
    }
    return tables.table_if_any([row for row in rows if row["boundary_excess"]], columns)


def context(metrics: dict, basis: Callable[[list[dict]], str]) -> dict | None:
    """Everything that ``layers.md.j2`` names under ``layers``; None when the study was not run.

    Parameters
    ----------
    metrics : dict
    basis : callable
        From Estimates to the line under their table.
    """
    rows, sums = metrics.get("layers"), metrics.get("additivity")
    if not rows:
        return None
    return {
        "priced": " and ".join(PRICED[stream] for stream in dict.fromkeys(row["stream"] for row in rows)),
        "groups": by_place(rows, round(1 - metrics["sizes"]["confidence"], 9)),
        "mark": MARK,
        "apart": APART if any(row["q_stands_out"] is not None for row in rows) else None,
        "left_out": any(row["kind"] == "but" for row in rows),
        "boundary_layers": any(row["boundary"] for row in rows),
        "basis": basis([row["kl"] for row in rows]),
        "additivity": additivity(sums) if sums else None,
        "streams": any(row["parts"] == "streams" for row in sums or []),
        "additivity_basis": basis([row["interaction"] for row in sums or []]),
        "boundary": boundary(sums or []),
    }


CHAPTER = Chapter(
    parts=PARTS,
    entries=entries,
    sections={
        "layers": PageSection(70, "What each layer costs alone and on top of the others", asks="whether layers add up")
    },
    context=lambda metrics, basis: {"layers": context(metrics, basis)},
    claims=lambda metrics: claims(metrics.get("additivity") or []),
    figures={"layers": Drawn(layers_table, layers)},
    limits=limits,
)

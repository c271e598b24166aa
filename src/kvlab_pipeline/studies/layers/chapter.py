"""The layers in the report: what each costs, and whether they add up."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
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
from kvlab_pipeline.studies.layers.numbers import additivity_entries, layer_entries
from kvlab_pipeline.studies.layers.tables import KINDS, NAMES, context
from kvlab_pipeline.studies.tidy import BITS, NATS, PROBABILITY, RATIO, Compared, Estimand, Level, Several

# Single layers, and whether their costs add up.
LAYERS = Several(
    {
        "engine": Level(),
        "protocol": Level(),
        "stream": Level(),
        "kind": Level("only: this layer and nothing else is coded; but: all layers, minus all layers without this one"),
        "layer": Level(),
        "boundary": Level(),
        "label": Level(),
        "cell_id": Level(),
        "kl": Estimand(NATS, "net of the identity cell's"),
        "p_value": Estimand(PROBABILITY),
        "q_value": Estimand(
            PROBABILITY, "corrected for the layers of one engine, protocol, stream and kind (Benjamini and Hochberg)"
        ),
        "q_stands_out": Estimand(
            PROBABILITY, "of the layer's cost against the mean over layers; null where there is one layer"
        ),
        "bits_per_value": Estimand(BITS),
    }
)
ADDITIVITY = Several(
    {
        "engine": Level(),
        "protocol": Level(),
        "stream": Level(),
        "parts": Level("what is added up: layers, or streams"),
        "joint": Estimand(NATS),
        "sum": Estimand(NATS),
        "ratio": Estimand(RATIO, "joint over sum; null where the sum cannot be told from zero"),
        "interaction": Estimand(NATS, "joint minus sum"),
        "left_out_sum": Estimand(NATS),
        "boundary_excess": Estimand(NATS, "what a boundary layer costs alone minus what another layer does"),
        "compared": Compared(),
    }
)

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


CHAPTER = Chapter(
    parts={"layers": LAYERS, "additivity": ADDITIVITY},
    entries=entries,
    sections={
        "layers": PageSection(70, "What each layer costs alone and on top of the others", asks="whether layers add up")
    },
    context=lambda metrics, basis: {"layers": context(metrics, basis)},
    claims=lambda metrics: claims(metrics.get("additivity") or []),
    figures={"layers": Drawn(layers_table, layers)},
    limits=limits,
)

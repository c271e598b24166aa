"""The bench's figures: how far from the limit at how many bits, and how fast."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.figure import (
    GREY,
    INK,
    PALE,
    Axis,
    Figure,
    LegendKey,
    Line,
    Look,
    Mark,
    Panel,
    linear_axis,
    log_axis,
    named_axis,
)
from validation.bench.summary import STREAMS, family, over_layers

# Okabe and Ito's palette and one more; the libraries are grey and told apart by their marks.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", INK)
SHAPES = ("square", "diamond", "triangle", "down", "plus")


def table(data: dict, source: dict) -> pl.DataFrame:
    """One row per codec and stream of a source: bits, dB above the limit, MB/s with most threads."""
    most, rows = str(max(data["machine"]["threads"])), []
    for one in data["subjects"]:
        for stream in STREAMS:
            found = over_layers(source, one["label"], stream)
            if found is None or found["above_db"] is None:
                continue
            by_task = source["speed"].get(one["label"], {}).get(stream, {})
            rate = {
                name: by_task.get(byte_task, by_task.get(name, {})).get(most, {}).get("value")
                for name, byte_task in (("encode", "write"), ("decode", "read"))
            }
            name = one["label"].split()[0]
            rows.append(
                {
                    "label": one["label"],
                    "name": name,
                    "family": family(name),
                    "conditioning": name.partition("+")[2],
                    "rival": one["rival"],
                    "nominal": one["bits"],
                    "stream": stream,
                    "bits": found["bits"],
                    "above": found["above_db"],
                }
                | rate
            )
    return pl.DataFrame(rows, infer_schema_length=None)


def looks(given: pl.DataFrame) -> dict[str, Look]:
    """Colour and mark of each codec."""
    own, rivals = (list(dict.fromkeys(given.filter(pl.col("rival") == rival)["family"])) for rival in (False, True))
    found = {family: Look(COLOURS[number % len(COLOURS)], size=0.8) for number, family in enumerate(own)}
    return found | {family: Look(GREY, SHAPES[number % len(SHAPES)], 0.8) for number, family in enumerate(rivals)}


def distance(given: pl.DataFrame) -> Figure:
    """dB above the limit against real bits; a panel per stream, a line per codec whose bits can be chosen."""
    whitened = pl.col("conditioning") == "center+whiten"  # of K alone: V is as with the mean removed
    given = given.with_row_index("row").filter(pl.col("nominal").is_not_null(), pl.col("conditioning") != "center")
    given = given.filter(~(whitened & (pl.col("stream") == "v")))
    given = given.sort(~pl.col("rival"), pl.col("family") == "klt", maintain_order=True)  # what matters is on top
    by_family, keys, panels = looks(given), {}, []
    places = Axis(spread(given["bits"]), "real bits per value")
    values = linear_axis(given["above"], "weighted error above the limit, dB")
    for stream in STREAMS:
        drawn, curves = [], []
        for (name,), line in given.filter(pl.col("stream") == stream).group_by("name", maintain_order=True):
            lines = line.sort("bits").to_dicts()
            look = replace(by_family[lines[0]["family"]], open=bool(lines[0]["conditioning"]))
            curves.append(curve(lines, look.colour))
            keys[name] = LegendKey(name, look, curves[-1])
            drawn += [point(line, look) for line in lines]
        panels.append(Panel(places, values, tuple(drawn), tuple(curves), title=stream.upper()))
    return Figure(
        "Distance to the Gaussian rate-distortion limit: down and to the left is better",
        "A line is a codec at several numbers of bits; the libraries are grey. Open marks: values whitened first.",
        tuple(panels),
        columns=len(STREAMS),
        keys=tuple(reversed(keys.values())),
        height=240,
    )


def spread(bits: pl.Series) -> tuple[float, float]:
    """The ends of the axis of bits."""
    low, high = bits.min(), bits.max()
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def curve(lines: list[dict], colour: str) -> Line:
    """A line through a codec's points: bold where it is klt, dotted where it is a library's."""
    first = lines[0]
    dash = "dotted" if first["rival"] else "dashed" if first["conditioning"] else "solid"
    width = 2.4 if first["family"] == "klt" else 1.2
    return Line(*(tuple(line[key] for line in lines) for key in ("bits", "above")), colour, width, dash)


def point(line: dict, look: Look) -> Mark:
    """A codec at one number of bits."""
    words = (line["label"], f"{fmt.number(line['above'])} dB above the limit at {fmt.number(line['bits'])} bits")
    return Mark(line["row"], line["bits"], line["above"], line["above"], line["above"], words, look)


def speed(given: pl.DataFrame) -> Figure:
    """Encode (open) and decode (filled) of K, one row per codec at the middle of the nominal bits."""
    nominal = sorted(set(given["nominal"].drop_nulls()))
    middle = nominal[len(nominal) // 2] if nominal else None
    by_family = looks(given.filter(pl.col("nominal").is_not_null())) | {"fp8": Look(), "identity": Look()}
    table = (
        given.with_row_index("row")
        .filter(
            pl.col("stream") == "k",
            pl.col("conditioning") == "",
            (pl.col("nominal") == middle)
            | pl.col("nominal").is_null()
            | pl.col("family").is_in(["quanto", "hqq-axis1"]),
        )
        .unique("name", keep="last", maintain_order=True)
    )
    lines = table.sort("encode", descending=True, nulls_last=True).to_dicts()
    drawn, guides = [], []
    for at, line in enumerate(lines):
        colour = by_family[line["family"]].colour
        # decode inside encode where both are as fast
        kinds = (("encode", Look(colour, size=1.45, open=True)), ("decode", Look(colour)))
        drawn += [rate(line, at, kind, look) for kind, look in kinds if line[kind]]
        both = tuple(line[kind] for kind, _ in kinds if line[kind])
        guides.append(Line((at,) * len(both), both, PALE, 2.0))
    values = log_axis(
        ({key: mark.value for key in marks.NUMBERS} for mark in drawn), "MB/s of bfloat16 input, most threads"
    )
    return Figure(
        "Speed on K; kvlab's codecs with their bytes",
        "The axis is logarithmic.",
        (Panel(named_axis(line["label"] for line in lines), values, tuple(drawn), tuple(guides), across=True),),
        keys=(LegendKey("encode", Look(size=1.45, open=True)), LegendKey("decode", Look())),
        height=20,
    )


def rate(line: dict, at: int, kind: str, look: Look) -> Mark:
    """How fast a codec is one way."""
    words = (line["label"], f"{kind}s {fmt.number(line[kind])} MB/s")
    return Mark(line["row"], at, line[kind], line[kind], line[kind], words, look)


FIGURES = {"distance": distance, "speed": speed}

"""The bench's figures: how far from the limit at how many bits, and how fast."""

from __future__ import annotations

import polars as pl

from kvlab.bench.summary import STREAMS, family, over_layers
from kvlab.report import format as fmt
from kvlab.report.figures.canvas import GREY, INK, PALE, canvas, rows_axis, styled, title

# Okabe and Ito's palette and one more; the libraries are grey and told apart by their marks.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6d1f", INK)
MARKS = "sD^vP"


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


def looks(given: pl.DataFrame) -> dict[str, tuple[str, str]]:
    """Colour and mark of each codec."""
    own, rivals = (list(dict.fromkeys(given.filter(pl.col("rival") == rival)["family"])) for rival in (False, True))
    found = {family: (COLOURS[number % len(COLOURS)], "o") for number, family in enumerate(own)}
    return found | {family: (GREY, MARKS[number % len(MARKS)]) for number, family in enumerate(rivals)}


@styled
def distance(given: pl.DataFrame):
    """dB above the limit against real bits; a panel per stream, a line per codec whose bits can be chosen."""
    whitened = pl.col("conditioning") == "center+whiten"  # of K alone: V is as with the mean removed
    given = given.filter(pl.col("nominal").is_not_null(), pl.col("conditioning") != "center")
    given = given.filter(~(whitened & (pl.col("stream") == "v")))
    figure, axes = canvas(height=4.6, panels=len(STREAMS), share=True)
    by_family = looks(given)
    for axis, stream in zip(axes, STREAMS, strict=True):
        for (name,), line in given.filter(pl.col("stream") == stream).group_by("name", maintain_order=True):
            first, line = line.row(0, named=True), line.sort("bits")
            colour, mark = by_family[first["family"]]
            axis.plot(
                line["bits"],
                line["above"],
                color=colour,
                marker=mark,
                linestyle=":" if first["rival"] else "--" if first["conditioning"] else "-",
                markerfacecolor="white" if first["conditioning"] else colour,
                markersize=4.5,
                linewidth=2.4 if first["family"] == "klt" else 1.2,
                zorder=2 if first["rival"] else 4 if first["family"] == "klt" else 3,
                label=name,
            )
        axis.set_xlabel(f"real bits per value of {stream.upper()}")
        axis.grid(color=PALE, linewidth=0.5)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("weighted error above the limit, dB")
    handles = {handle.get_label(): handle for axis in axes for handle in axis.get_lines()}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    title(figure, "Distance to the Gaussian rate-distortion limit: down and to the left is better")
    return figure


@styled
def speed(given: pl.DataFrame):
    """Encode (open) and decode (filled) of K, one row per codec at the middle of the nominal bits."""
    nominal = sorted(set(given["nominal"].drop_nulls()))
    middle = nominal[len(nominal) // 2] if nominal else None
    lines = given.filter(
        pl.col("stream") == "k",
        pl.col("conditioning") == "",
        (pl.col("nominal") == middle) | pl.col("nominal").is_null() | pl.col("family").is_in(["quanto", "hqq-axis1"]),
    ).unique("name", keep="last", maintain_order=True)
    lines = lines.sort("encode", descending=True, nulls_last=True)
    figure, (axis,) = canvas(height=1.2 + 0.27 * len(lines))
    by_family = looks(given.filter(pl.col("nominal").is_not_null())) | {"fp8": (INK, "o"), "identity": (INK, "o")}
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: fmt.plain(value))
    for row, line in enumerate(lines.iter_rows(named=True)):
        colour, _ = by_family[line["family"]]
        both = [value for value in (line["encode"], line["decode"]) if value]
        axis.plot(both, [row] * len(both), color=PALE, linewidth=2, zorder=1)
        for value, filled in ((line["encode"], False), (line["decode"], True)):
            if value:
                size = 5.5 if filled else 8  # one inside the other where both are as fast
                fill = colour if filled else "white"
                axis.plot(value, row, "o", color=colour, markerfacecolor=fill, markersize=size, zorder=2)
    rows_axis(axis, lines["label"].to_list())
    axis.set_xlabel("MB/s of bfloat16 input with most threads (logarithmic); open: encode, filled: decode")
    title(figure, "Speed on K; kvlab's codecs with their bytes")
    return figure


FIGURES = {"distance": distance, "speed": speed}

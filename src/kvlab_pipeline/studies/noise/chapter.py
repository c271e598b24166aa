"""Plain noise in the report: how KL grows with an error, what rounding costs, whether direction matters."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks, tables
from kvlab_pipeline.rendering.figure import Axis, Figure, LegendKey, Line, Look, Panel, colour_of, log_axis, shape_of
from kvlab_pipeline.rendering.parts import KL_UNIT, reading, resolution
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.noise.numbers import (
    PARTS,
    closure_entries,
    noise_entries,
    noise_slope_entries,
    structure_entries,
)

# Whether roundings cost what the curves predict, and whether an error's direction matters, from ``metrics.json``.


def claims(closure: list[dict], structure: list[dict]) -> list[dict]:
    """One claim for each rounding that the curves predict, and one for each cell of the codec with its control."""
    casts = [rounded(row) for row in closure if row["against"] == "cast"]
    return casts + [turned(row) for row in structure if row["ratio"]]


def rounded(row: dict) -> dict:
    """The claim that a rounding costs what the noise curve predicts, or does not."""
    subject = f"Rounding {words(row['stream'])} to {row['dtype']} (`{row['engine']}`)"
    unit = "times what the noise curve predicts"
    how = {"up": "brings KL", "down": "brings KL only", "null": 1.0, "unit": unit}
    return claim("noise", subject, row["ratio"], row["compared"], **how)


def turned(row: dict) -> dict:
    """The claim that the direction of the codec's error matters, or does not."""
    subject = f"The studied codec's error on {words(row['stream'])} (`{row['engine']}`)"
    unit = "times what an error of the same size and random direction costs"
    return claim("noise", subject, row["ratio"], row["compared"], null=1.0, unit=unit)


def words(stream: str) -> str:
    """A stream in words."""
    return " and ".join(stream.upper())


def entries(measured: ChapterInputs) -> dict:
    """Its parts of ``metrics.json``."""
    given = (measured.params, measured.results, measured.boot)
    return {
        "noise": noise_entries(*given),
        "noise_slope": noise_slope_entries(*given),
        "closure": closure_entries(*given),
        "structure": structure_entries(*given),
    }


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of noise."""
    return [
        ("noise, KL", estimates_of(metrics, "noise", "kl")),
        ("noise, slope", estimates_of(metrics, "noise_slope", "slope")),
    ]


# ---------------------------------------------------------------------------------------------- figure

GROUPS = {"all": "all layers", "coded": "coded layers", "boundary": "boundary layers"}
NOISE, CAST = "noise", "cast"


def noise_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, stream, layer group and sigma; the slope of its line, whether sigma is inside its range.

    `what` is ``noise``, or ``cast`` for the measured rounding of one stream to a shorter dtype, which stands at
    that dtype's sigma.
    """
    fits = {(row["engine"], row["stream"], row["group"]): row for row in metrics.get("noise_slope") or []}
    rows = []
    for row in metrics.get("noise") or []:
        fit = fits.get((row["engine"], row["stream"], row["group"]))
        inside = bool(fit and fit["range"] and fit["range"][0] <= row["sigma"] <= fit["range"][1])
        rows.append(table_row(row, NOISE, row["kl"], fit["slope"] if fit else None, inside))
    panels = {(row["stream"], row["group"]) for row in rows}
    for row in metrics.get("closure") or []:
        if row["against"] == "cast" and (row["stream"], "all") in panels:
            rows.append(table_row(row | {"group": "all"}, CAST, row["measured"], None, False))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def table_row(row: dict, what: str, kl: dict, slope: dict | None, inside: bool) -> dict:
    """One drawn number."""
    slope = slope or dict.fromkeys(("value", "low", "high"))
    return (
        {"what": what}
        | {key: row[key] for key in ("engine", "stream", "group")}
        | {"sigma": float(row["sigma"])}
        | marks.interval(kl)
        | {f"slope_{key}": slope[key] for key in ("value", "low", "high")}
        | {"in_range": inside}
    )


def noise(table: pl.DataFrame) -> Figure:
    """KL against the size of the noise, both axes logarithmic; a row per stream, a column per layer group."""
    lines = marks.numbered(table)
    streams, groups, engines = marks.each(lines, "stream", "group", "engine")
    places = Axis((table["sigma"].min() / 1.4, table["sigma"].max() * 1.4), "noise, times rms", log=True)
    values = log_axis(lines, f"KL, {KL_UNIT}", room=30**0.8)  # for the slopes
    panels = []
    for stream, group in ((stream, group) for stream in streams for group in groups):
        mine = [line for line in lines if (line["stream"], line["group"]) == (stream, group)]
        panels.append(panel(mine, engines, places, values, f"{stream.upper()}, {GROUPS[group]}"))
    keys = [LegendKey(one, look(engines, one, NOISE), Line((), (), colour_of(one), 1.4)) for one in engines]
    keys.append(LegendKey("fitted slope", line=Line((), (), width=1.0, dash="dashed")))
    if CAST in table["what"]:
        keys.append(LegendKey("rounding", Look(shape="diamond", size=1.2, open=True)))
    return Figure(
        "How fast KL grows with plain Gaussian noise",
        "Both axes are logarithmic; a dashed line is the fitted power law over the range that it was fitted to, its "
        "slope is named. An open diamond is what rounding to a shorter dtype costs, at the size of its error. "
        "An arrow at the lower end stands for a value that is not above zero.",
        tuple(panels),
        columns=len(groups),
        keys=tuple(keys),
    )


def panel(lines: list[dict], engines: list[str], places: Axis, values: Axis, title: str) -> Panel:
    """One stream and layer group: each engine's curve, its fitted line, its slope in words, its roundings."""
    drawn, guides, notes = [], [], []
    for engine in engines:
        mine = sorted((line for line in lines if line["engine"] == engine), key=lambda line: line["sigma"])
        drawn += [marks.mark(one, one["sigma"], point_words(one), look(engines, engine, one["what"])) for one in mine]
        noised = [line for line in mine if line["what"] == NOISE]
        fitted = [line for line in noised if line["in_range"] and line["slope_value"] is not None and line["value"] > 0]
        guides.append(curve([line for line in noised if line["value"] > 0], engine, 2.0 if not guides else 0.8))
        if fitted:
            guides.append(Line(*fitted_ends(fitted), colour_of(engine), 1.0, "dashed"))
            notes.append((marks.quantity(f"{engine}:", fitted[0], "slope_", unit=""), colour_of(engine)))
    return Panel(places, values, tuple(drawn), tuple(guides), notes=tuple(notes), title=title)


def curve(lines: list[dict], engine: str, width: float) -> Line:
    """A line through an engine's points."""
    return Line(*(tuple(line[key] for line in lines) for key in ("sigma", "value")), colour_of(engine), width)


def look(engines: list[str], engine: str, what: str) -> Look:
    """A later engine's marks are smaller and open, so that an earlier one's are seen below; roundings are diamonds."""
    order = engines.index(engine)
    if what == CAST:
        return Look(colour_of(engine), "diamond", max(0.9, 1.6 - 0.5 * order), open=True)
    return Look(colour_of(engine), shape_of(order), max(0.55, 1.2 - 0.5 * order), open=order > 0)


def fitted_ends(lines: list[dict]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Both ends of the power law through the geometric centre of the points that it was fitted to."""
    centre_x = sum(log(line["sigma"]) for line in lines) / len(lines)
    centre_y = sum(log(line["value"]) for line in lines) / len(lines)
    ends = (lines[0]["sigma"], lines[-1]["sigma"])
    return ends, tuple(exp(centre_y + lines[0]["slope_value"] * (log(x) - centre_x)) for x in ends)


def point_words(line: dict) -> list[str]:
    """What a point says."""
    slope = [] if line["slope_value"] is None else [marks.quantity("slope of its line", line, "slope_", unit="")]
    size = f"of {fmt.number(line['sigma'])} times its rms"
    stream = line["stream"].upper()
    what = f"noise on {stream} {size}" if line["what"] == NOISE else f"rounding {stream}, an error {size}"
    return [what, f"{line['engine']}, {GROUPS[line['group']]}", marks.quantity("KL", line), *slope, marks.basis(line)]


# ---------------------------------------------------------------------------------------------- tables

WHERE = {"in_forward": "as they are computed", "snapshot": "in the finished clean cache"}
STREAMS = {"k": "K", "v": "V", "kv": "K and V"}


def by_engine(rows: list[dict]) -> list[dict]:
    """One table per engine: ``[{"engine", "table"}]``."""
    engines = dict.fromkeys(row["engine"] for row in rows)
    return [{"engine": name, "table": sizes([row for row in rows if row["engine"] == name])} for name in engines]


def sizes(rows: list[dict]) -> str:
    """One line per size of noise, a column per stream and layer group."""
    found = {(row["sigma"], row["stream"], row["group"]): row["kl"] for row in rows}
    columns = list(dict.fromkeys((row["stream"], row["group"]) for row in rows))
    lines = [
        [fmt.plain(sigma), *(fmt.estimate(found.get((sigma, *column))) for column in columns)]
        for sigma in sorted({row["sigma"] for row in rows})
    ]
    return fmt.table(["noise", *(f"{stream.upper()}, {GROUPS[group]}" for stream, group in columns)], lines)


def slopes(rows: list[dict]) -> str:
    """The exponent with which KL grows, and the coefficient of the square."""
    columns = {
        "engine": tables.code("engine"),
        "stream": tables.stream(),
        "noise on": lambda row: GROUPS[row["group"]],
        "slope": tables.estimate("slope"),
        "fitted over noise of": lambda row: " to ".join(map(fmt.plain, row["range"])) if row["range"] else fmt.DASH,
        f"c of KL = c noise², {KL_UNIT}": tables.estimate("coefficient"),
    }
    return tables.table(rows, columns)


def closure(rows: list[dict]) -> str | None:
    """A dtype's rounding of K and V: predicted from the curve, and measured."""
    columns = {
        "engine": tables.code("engine"),
        "rounded": lambda row: STREAMS[row["stream"]],
        f"predicted KL, {KL_UNIT}": tables.estimate("predicted"),
        f"measured KL, {KL_UNIT}": tables.estimate("measured"),
        "measured / predicted": tables.estimate("ratio"),
        "inside the fitted range": lambda row: "yes" if row["in_range"] else "no",
        "does it close?": tables.text("reading"),
    }
    return tables.table_if_any([row for row in rows if row["against"] == "cast"], columns)


def explained(rows: list[dict]) -> str | None:
    """An engine's own run in the dtype: how much of its KL the rounding of K and V is."""
    columns = {
        "run": tables.code("against"),
        f"its KL, {KL_UNIT}": tables.estimate("measured"),
        f"predicted of K and V, {KL_UNIT}": tables.estimate("predicted"),
        "share by the curve, %": tables.percent("share"),
        "share by rounding them, %": tables.percent("cast_share"),
    }
    return tables.table_if_any([row for row in rows if row["against"] != "cast"], columns)


def structure(rows: list[dict]) -> str | None:
    """The codec's error against one of the same size and random direction."""
    columns = {
        "engine": tables.code("engine"),
        "stream": lambda row: STREAMS[row["stream"]],
        f"codec's KL, {KL_UNIT}": tables.estimate("codec"),
        f"random direction's KL, {KL_UNIT}": tables.estimate("isotropic"),
        "ratio": tables.estimate("ratio"),
        "beside one": lambda row: ratio_reading(row["ratio"]),
    }
    return tables.table_if_any(rows, columns)


def ratio_reading(given: dict | None) -> str:
    """The last column of a table of ratios: whether it is told from 1."""
    if given is None:
        return "no ratio: the random direction costs nothing"
    found = resolution(given | {end: given[end] - 1 for end in ("value", "low", "high")})
    return "clear of one" if found["resolved"] else reading(found)


def noise_context(metrics: dict, basis: Callable[[list[dict]], str]) -> dict | None:
    """Everything that ``noise.md.j2`` names under ``noise``; None when the study was not run.

    Parameters
    ----------
    metrics : dict
    basis : callable
        From Estimates to the line under their table.
    """
    rows = metrics.get("noise")
    if not rows:
        return None
    fitted, closing, structured = (metrics.get(name) or [] for name in ("noise_slope", "closure", "structure"))
    casts = [row for row in closing if row["against"] == "cast"]
    runs = [row for row in closing if row["against"] != "cast"]
    return {
        "protocol": rows[0]["protocol"],
        "where": WHERE[rows[0]["protocol"]],
        "groups": by_engine(rows),
        "basis": basis([row["kl"] for row in rows]),
        "slopes": slopes(fitted) if fitted else None,
        "closure": closure(closing),
        "closure_basis": basis([row["measured"] for row in casts]),
        "dtype": casts[0]["dtype"] if casts else None,
        "sigma": fmt.number(casts[0]["sigma"]) if casts else None,
        "factor": fmt.plain(casts[0]["factor"]) if casts else None,
        "explained": explained(closing),
        "explained_basis": basis([row["measured"] for row in runs]),
        "structure": structure(structured),
        "structure_basis": basis([row["codec"] for row in structured]),
    }


CHAPTER = Chapter(
    parts=PARTS,
    entries=entries,
    sections={
        "noise": PageSection(
            80, "How KL grows with an error, and what rounding costs", asks="rounding and the direction of the error"
        )
    },
    context=lambda metrics, basis: {"noise": noise_context(metrics, basis)},
    claims=lambda metrics: claims(metrics.get("closure") or [], metrics.get("structure") or []),
    figures={"noise": Drawn(noise_table, noise)},
    limits=limits,
)

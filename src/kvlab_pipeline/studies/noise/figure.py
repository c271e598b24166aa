"""How fast KL grows with plain Gaussian noise, with the fitted power law and the rounding that it predicts."""

from __future__ import annotations

from math import exp, log

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.figure import Axis, Figure, LegendKey, Line, Look, Panel, colour_of, log_axis, shape_of
from kvlab_pipeline.rendering.parts import KL_UNIT

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
        drawn += [marks.mark(one, one["sigma"], words(one), look(engines, engine, one["what"])) for one in mine]
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


def words(line: dict) -> list[str]:
    """What a point says."""
    slope = [] if line["slope_value"] is None else [marks.quantity("slope of its line", line, "slope_", unit="")]
    size = f"of {fmt.number(line['sigma'])} times its rms"
    stream = line["stream"].upper()
    what = f"noise on {stream} {size}" if line["what"] == NOISE else f"rounding {stream}, an error {size}"
    return [what, f"{line['engine']}, {GROUPS[line['group']]}", marks.quantity("KL", line), *slope, marks.basis(line)]

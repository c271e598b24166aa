"""The codec's own error in the report, without a model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, product

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks, tables
from kvlab_pipeline.rendering.basis import METHODS, Basis
from kvlab_pipeline.rendering.figure import (
    GREY,
    Figure,
    LegendKey,
    Look,
    Panel,
    beside,
    colour_of,
    linear_axis,
    log_axis,
    shape_of,
    whole_axis,
)
from kvlab_pipeline.rendering.parts import HELD, not_resolved
from kvlab_pipeline.rendering.withheld import undecided
from kvlab_pipeline.studies.baselines import LEVELS
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.residual.numbers import PARTS, residual_entries

# The codec's own error layer by layer, and how many directions its blocks keep, on each engine's capture.


def residual_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, variance ratio, stream and layer: the error as attention weighs it, relative.

    `measure` is ``whitened`` for K and ``raw`` for V, which has no other.
    """
    rows = []
    for row in (metrics.get("residual") or {}).get("rows") or []:
        if row["layer"] is not None:
            measure = "whitened" if row["whitened_error"] else "raw"
            place = {key: row[key] for key in ("engine", "variance_ratio", "stream", "layer", "boundary")}
            rows.append(place | {"measure": measure} | marks.interval(row[f"{measure}_error"]))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def residual(table: pl.DataFrame) -> Figure:
    """Relative squared error by layer on a logarithmic axis, a panel per stream; open marks: boundary layers."""
    lines = marks.numbered(table)
    streams, engines, ratios = marks.each(lines, "stream", "engine", "variance_ratio")
    places, values = whole_axis(table["layer"], "layer"), log_axis(lines, "squared error, relative")

    def dot(line: dict):
        at = line["layer"] + beside(engines.index(line["engine"]), len(engines), 0.5)
        shape = shape_of(ratios.index(line["variance_ratio"]))
        return marks.mark(line, at, error_words(line), Look(colour_of(line["engine"]), shape, open=line["boundary"]))

    panels = []
    for stream in streams:
        mine = [line for line in lines if line["stream"] == stream]
        panels.append(Panel(places, values, tuple(map(dot, mine)), title=f"{stream.upper()}, {mine[0]['measure']}"))
    return Figure(
        "The codec's own error on each engine's K and V",
        "Squared error over the squared deviation from the heads' means; errors of K are weighed by Sigma_q. "
        "An open mark is a boundary layer. The axis is logarithmic.",
        tuple(panels),
        columns=len(streams),
        keys=tuple(keys(engines, ratios, lambda order: Look(GREY, shape_of(order)))),
        height=210,
    )


def keys(engines: list[str], ratios: list[float], look: Callable[[int], Look]) -> list[LegendKey]:
    """The legend: engines by colour, and the variance ratios, if there are several, by `look` of their place."""
    found = [LegendKey(engine, Look(colour_of(engine))) for engine in engines] if len(engines) > 1 else []
    if len(ratios) > 1:
        found += [LegendKey(f"variance_ratio {fmt.plain(ratio)}", look(order)) for order, ratio in enumerate(ratios)]
    return found


def error_words(line: dict) -> list[str]:
    """What a layer's mark says."""
    boundary = ["boundary layer"] if line["boundary"] else []
    return [
        f"{line['stream'].upper()} of layer {fmt.number(line['layer'])}, {line['engine']}",
        f"variance_ratio {fmt.plain(line['variance_ratio'])}",
        marks.quantity(f"relative squared error, {line['measure']},", line, unit=""),
        *boundary,
        marks.basis(line, "coded"),
    ]


def d_eff_table(metrics: dict) -> pl.DataFrame | None:
    """One row per engine, variance ratio, stream and kept rank: blocks of all layers, and their share of all."""
    rows = []
    for row in (metrics.get("residual") or {}).get("rows") or []:
        place = {key: row[key] for key in ("engine", "variance_ratio", "stream")}
        for share in row["d_eff_shares"] or []:
            rows.append(place | {key: share[key] for key in ("d_eff", "blocks")} | marks.interval(share["share"]))
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def d_eff(table: pl.DataFrame) -> Figure:
    """Share of blocks by kept rank: a panel per stream, a colour per engine, open bars for later variance ratios."""
    lines = marks.numbered(table)
    streams, engines, ratios = marks.each(lines, "stream", "engine", "variance_ratio")
    places = whole_axis(table["d_eff"], "kept rank (d_eff)")
    values = linear_axis(table["high"], "share of all blocks", form="percent")

    def bar(line: dict):
        at = line["d_eff"] + beside(engines.index(line["engine"]), len(engines), 0.8)
        look = Look(colour_of(line["engine"]), open=ratios.index(line["variance_ratio"]) > 0)
        return marks.mark(line, at, rank_words(line), look, bar=0.8 / len(engines))

    panels = [
        Panel(places, values, tuple(bar(line) for line in lines if line["stream"] == stream), title=stream.upper())
        for stream in streams
    ]
    return Figure(
        "How many directions the codec's blocks keep, all layers",
        "Blocks of all layers; thin lines are intervals.",
        tuple(panels),
        columns=len(streams),
        keys=tuple(keys(engines, ratios, lambda order: Look(GREY, "square", open=order > 0))),
    )


def rank_words(line: dict) -> list[str]:
    """What a bar says."""
    return [
        f"rank {fmt.number(line['d_eff'])} of {line['stream'].upper()}, {line['engine']}",
        f"variance_ratio {fmt.plain(line['variance_ratio'])}",
        marks.quantity("share of all blocks", line, unit=""),
        f"{fmt.number(line['blocks'])} blocks",
        marks.basis(line, "coded"),
    ]


# Whether the codec errs more on one engine's capture, from the part ``residual`` of ``metrics.json``.


def claims(residual: dict) -> list[dict]:
    """One claim a ratio and stream, over the layers that the studied recipe codes.

    The cells that such a claim compares are the two captures, by the names of their results.
    """
    pooled = [row for row in residual.get("ratios") or [] if row["layer"] is None and row["ratio"]]
    widest = "coded" if any(row["group"] == "coded" for row in pooled) else "all"
    return [between_engines(row) for row in pooled if row["group"] == widest]


def between_engines(row: dict) -> dict:
    """One of them; it counts as resolved only when the row does."""
    low, high = LEVELS["engine"]
    subject = (
        f"Coding {row['stream'].upper()} of `{high}` in place of `{low}`, `variance_ratio`"
        f" `{row['variance_ratio']:g}`, {row['measure']}:"
    )
    captures = [[{"cell_id": f"residual/{engine}", "engine": engine}] for engine in (high, low)]
    how = {"up": "the squared error rises", "down": "the squared error falls", "null": 1.0, "unit": "times"}
    return claim("residual", subject, row["ratio"], captures, **how) | {
        "borne_out": row["resolved"],
        "objection": "the signs of the windows do not bear it out",
    }


def entries(measured: ChapterInputs) -> dict:
    """Its part of ``metrics.json``."""
    paths, provenance = measured.sources.residual, measured.results.provenance
    return {"residual": residual_entries(measured.params, paths, provenance, measured.boot)}


def context(metrics: dict, basis: Basis) -> dict:
    """What ``residual.md.j2`` names."""
    return {
        "residual": residual_context(
            metrics.get("residual"),
            (metrics.get("identity") or {}).get("calibration_origin"),
            basis.confidence,
            METHODS,
            undecided(metrics) is not None,
        )
    }


# ---------------------------------------------------------------------------------------------- tables

LARGER = "larger on `vllm` by, %"
GROUPS = {"coded": "coded layers", "all": "all layers"}


def layer_words(row: dict) -> str:
    """A layer or a group of layers, boundary layers marked."""
    if row["layer"] is None:
        return GROUPS[row["group"]]
    return f"{row['layer']}, boundary" if row["boundary"] else str(row["layer"])


def engines_of(residual: dict) -> list[str]:
    """Those whose capture was coded, in the plan's order."""
    return list(dict.fromkeys(row["engine"] for row in residual["rows"]))


def variance_ratios(residual: dict) -> list[float]:
    """Those that were coded, in the plan's order."""
    return list(dict.fromkeys(row["variance_ratio"] for row in residual["rows"]))


def errors(residual: dict) -> list[dict]:
    """Error, rank, outliers and bytes: one table per engine and variance ratio.

    Returns
    -------
    list of dict
        ``engine``, ``variance_ratio`` (text), ``table``.
    """
    found = []
    for engine, ratio in product(engines_of(residual), variance_ratios(residual)):
        rows = [row for row in residual["rows"] if (row["engine"], row["variance_ratio"]) == (engine, ratio)]
        found.append({"engine": engine, "variance_ratio": fmt.plain(ratio), "table": engine_errors(rows)})
    return found


def engine_errors(rows: list[dict]) -> str:
    """Layers of one engine at one variance ratio; a line of a group is the mean of its layers, its bytes their sum."""
    columns = {
        "layer": layer_words,
        "stream": tables.stream(),
        "raw error, %": tables.percent("raw_error"),
        "whitened error, %": tables.percent("whitened_error"),
        "kept rank (`d_eff`)": tables.estimate("d_eff"),
        "outliers, %": tables.percent("outlier_rate"),
        "bits per value": tables.estimate("bits_per_value"),
        "bytes per window": lambda row: fmt.number(round(row["frame_bytes"]["value"])),
    }
    return tables.table(rows, columns)


def ranks(residual: dict) -> str:
    """How the kept ranks of single blocks scatter: the lowest, the middle and the highest."""
    lines = []
    for row in residual["rows"]:
        if row["layer"] is not None and len(row["d_eff_blocks"]) > 1:
            name = [f"`{row['engine']}`", fmt.plain(row["variance_ratio"]), row["stream"].upper(), layer_words(row)]
            lines.append([*name, *map(fmt.whole, rank_spread(row["d_eff_blocks"]))])
    headers = ["engine", "`variance_ratio`", "stream", "layer", "lowest rank", "median", "highest", "blocks"]
    return fmt.table(headers, lines) if lines else ""


def rank_spread(blocks: dict[str, int]) -> tuple[int, int, int, int]:
    """Lowest, (lower) median and highest kept rank, and the number of blocks, of a histogram."""
    counted = sorted((int(rank), count) for rank, count in blocks.items())
    total = sum(count for _, count in counted)
    reached = accumulate(count for _, count in counted)
    median = next(rank for (rank, _), seen in zip(counted, reached, strict=True) if 2 * seen >= total)
    return counted[0][0], median, counted[-1][0], total


def ratios(residual: dict, held: bool = False) -> list[dict]:
    """Errors on one engine's capture against the other's: ``[{"variance_ratio", "table"}]``."""
    found = []
    for ratio in variance_ratios(residual):
        rows = [row for row in residual["ratios"] if row["variance_ratio"] == ratio]
        if rows:
            found.append({"variance_ratio": fmt.plain(ratio), "table": ratio_table(rows, held)})
    return found


def ratio_table(rows: list[dict], held: bool = False) -> str:
    """How much larger the error is on `vllm`'s capture, in per cent; `held` where it is open if the engines agree."""
    columns = {
        "layer": layer_words,
        "stream": tables.stream(),
        "error": tables.text("measure"),
        LARGER: tables.change("ratio", signed=True),
        "q-value (groups: p-value)": lambda row: fmt.number(
            row["p_value"] if row["q_value"] is None else row["q_value"], 2
        ),
        "reading": lambda row: HELD if held and row["ratio"] else reading(row),
    }
    return tables.table(rows, columns)


def reading(row: dict) -> str:
    """What the ratio of two engines' errors says."""
    if row["ratio"] is None:
        return "no error on either"
    if row["resolved"]:
        return f"larger on `{'vllm' if row['ratio']['value'] > 1 else 'hf'}`"
    if not row["ratio"]["low"] <= 1 <= row["ratio"]["high"]:
        return "not resolved, the signs of the windows do not bear it out"
    needed = row["windows_needed"]
    count = None if needed is None or needed >= fmt.OUT_OF_REACH else fmt.whole(needed)
    return not_resolved(fmt.largest(row["ratio"], 1.0, 100), count, " %")


def basis(residual: dict, level: str, methods: dict[str, str]) -> str:
    """The line under the tables: on how much they rest. `methods` puts the names of methods into words."""
    given = [row["raw_error"] for row in residual["rows"]]
    used = {one.get("method", "bca") for one in given}
    words = " or ".join(word for method, word in methods.items() if method in used)
    windows, tokens = (fmt.span(one[key] for one in given) for key in ("n_windows", "n_tokens"))
    return (
        f"*{windows} windows of the calibration split, {tokens} coded tokens, {level} intervals in brackets ({words}).*"
    )


def pooled(residual: dict, held: bool = False) -> str:
    """The comparison over the layers that the studied recipe codes, which are all if it leaves none alone."""
    rows = [row for row in residual["ratios"] if row["layer"] is None]
    widest = "coded" if any(row["group"] == "coded" for row in rows) else "all"
    columns = {
        "stream": tables.stream(),
        "error": tables.text("measure"),
        "`variance_ratio`": tables.plain("variance_ratio"),
        LARGER: tables.change("ratio", signed=True),
        "reading": lambda row: HELD if held and row["ratio"] else reading(row),
    }
    return tables.table([row for row in rows if row["group"] == widest], columns)


def residual_context(
    residual: dict | None, origin: str | None, confidence: float, methods: dict[str, str], held: bool = False
) -> dict | None:
    """Everything that ``residual.md.j2`` names; None when the study was not run.

    What compares engines may have been taken out of `residual`; see `kvlab_pipeline.rendering.withheld`.
    """
    if not (residual or {}).get("rows"):
        return None
    residual = {"ratios": []} | residual
    engines = engines_of(residual)
    return {
        "origin": origin,
        "engines": engines,
        "several": len(engines) > 1,
        "boundary": any(row["boundary"] for row in residual["rows"]),
        "errors": errors(residual),
        "ranks": ranks(residual),
        "ratios": ratios(residual, held),
        "pooled": pooled(residual, held),
        "basis": basis(residual, fmt.percent(confidence), methods),
    }


CHAPTER = Chapter(
    parts=PARTS,
    entries=entries,
    sections={
        "residual": PageSection(
            90, "Error, rank and bytes by layer, without a model", asks="the codec's error on each engine's capture"
        )
    },
    context=context,
    claims=lambda metrics: claims(metrics.get("residual") or {}),
    figures={"residual": Drawn(residual_table, residual), "d_eff": Drawn(d_eff_table, d_eff)},
)

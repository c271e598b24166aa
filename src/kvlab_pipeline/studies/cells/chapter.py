"""The cells in the report: every cell, and what one change of the codec costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks, tables
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.cells.numbers import PARTS, cell_entries
from kvlab_pipeline.studies.chapter import Chapter, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim

# What the codec costs, cell by cell.


def cells_table(metrics: dict) -> pl.DataFrame | None:
    """One row per coded cell in the dtype of the gap: net KL and bits per value."""
    coded = [cell for cell in metrics.get("cells") or [] if cell["role"] == "codec"]
    reduced = [cell for cell in coded if cell["dtype"] != "float32"]
    keys = ("cell_id", "label", "engine", "dtype", "protocol", "variance_ratio", "bits_per_value")
    rows = [
        {key: cell[key] for key in keys} | marks.interval(cell["kl_net"])
        for cell in reduced or coded
        if cell["kl_net"] is not None
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def cells(table: pl.DataFrame) -> Figure:
    """One row per recipe and protocol, one dot per engine, net KL on a logarithmic axis."""
    return marks.by_row(
        table,
        name=cell_name,
        words=cell_words,
        title=f"What the codec costs, cell by cell ({', '.join(dict.fromkeys(table['dtype']))})",
        axis=f"net KL, {KL_UNIT} (logarithmic)",
        note="Rows are named by cell, protocol and variance_ratio. Net KL is KL less the engine's own noise "
        "floor. The axis is logarithmic; an arrow at its left end stands for a value that is not above zero.",
    )


def cell_name(line: dict) -> str:
    """A cell's name on the axis: what is coded, where, at which ratio if it has one."""
    parts = [line["label"], line["protocol"]]
    if line["variance_ratio"] is not None:
        parts.append(fmt.plain(line["variance_ratio"]))
    return ", ".join(parts)


def cell_words(line: dict) -> list[str]:
    """What a cell's mark says."""
    return [
        cell_name(line),
        f"{line['engine']}, {line['dtype']}",
        marks.quantity("net KL", line),
        f"{fmt.number(line['bits_per_value'])} bits per value",
        marks.basis(line),
        f"cell {line['cell_id']}",
    ]


# What each cell of params.yaml changes beside its counterpart, from the part ``cells`` of ``metrics.json``.


def claims(cells: list[dict]) -> list[dict]:
    """One claim, in net KL, for each cell that has a counterpart; resolved only where its q-value bears it out."""
    return [one_claim(cell) for cell in cells if cell["difference"]]


def one_claim(cell: dict) -> dict:
    """The claim of a cell beside its counterpart."""
    found = claim("cells", subject(cell), cell["difference"], cell["compared"])
    if cell["q_value"] <= 1 - cell["difference"]["confidence"]:
        return found
    objection = f"its q-value among all changes is {fmt.number(cell['q_value'], 2)}"
    return found | {"borne_out": False, "objection": objection}


def subject(cell: dict) -> str:
    """A cell in place of its counterpart, and where."""
    other = f"`{cell['against']}`" if cell["against"] else "the studied cell"
    return f"`{cell['label']}` in place of {other} (`{cell['engine']}`, `{cell['protocol']}`)"


# ---------------------------------------------------------------------------------------------- tables


def by_engine(cells: Iterable[dict], make: Callable[[list[dict]], str]) -> list[dict]:
    """One table per engine and dtype: ``[{"engine", "dtype", "table"}]``."""

    def key(cell: dict) -> tuple[str, str]:
        return cell["engine"], cell["dtype"]

    ordered = sorted(cells, key=key)
    return [
        {"engine": engine, "dtype": dtype, "table": make(list(group))}
        for (engine, dtype), group in groupby(ordered, key)
    ]


def name(cell: dict) -> list[str]:
    """The first columns of every table of cells."""
    return [cell["label"], f"`{cell['protocol']}`", fmt.plain(cell["variance_ratio"])]


NAMES = {
    "cell": tables.text("label"),
    "protocol": tables.code("protocol"),
    "`variance_ratio`": tables.plain("variance_ratio"),
}


def costs(rows: list[dict]) -> str:
    """What each cell costs and what it stores."""
    columns = NAMES | {
        "bits per value": tables.number("bits_per_value"),
        "kept rank, K / V": lambda row: " / ".join(
            fmt.number((row["d_eff_mean"] or {}).get(one)) for one in ("k", "v")
        ),
        f"net KL, {KL_UNIT}": tables.estimate("kl_net"),
        "beside its counterpart": tables.estimate("difference", signed=True),
        "q-value": tables.number("q_value", 2),
        "perplexity change, %": tables.change("ppl_ratio"),
        "same top token, %": tables.percent("top1_agreement"),
        "right to wrong, %": tables.percent("flips_to_wrong"),
        "wrong to right, %": tables.percent("flips_to_right"),
    }
    return tables.table(rows, columns)


def percentiles(rows: list[dict]) -> str:
    """KL of the ordinary token and of the worst ones."""
    ranks = sorted({rank for row in rows for rank in row["kl_percentiles"]}, key=float)
    columns = {
        "median" if float(rank) == 50 else f"{rank} %": lambda row, rank=rank: fmt.number(
            row["kl_percentiles"].get(rank)
        )
        for rank in ranks
    }
    return tables.table(rows, NAMES | columns)


def by_confidence(rows: list[dict]) -> str:
    """KL where the uncompressed model was unsure, and where it was sure."""

    def within(row: dict, low: float, high: float) -> str:
        return fmt.number(
            next((one["kl"] for one in row["kl_by_confidence"] if (one["low"], one["high"]) == (low, high)), None)
        )

    edges = sorted({(one["low"], one["high"]) for row in rows for one in row["kl_by_confidence"]})
    columns = {f"{fmt.plain(low)} to {fmt.plain(high)}": partial(within, low=low, high=high) for low, high in edges}
    return tables.table(rows, NAMES | columns)


def published(rows: list[dict]) -> str:
    """The published study's estimator beside ours."""
    columns = {
        "published estimator, %": tables.percent("published_estimator"),
        "perplexity change, %": tables.change("ppl_ratio"),
    }
    return tables.table(rows, NAMES | columns)


def context(metrics: dict, basis: Basis) -> dict:
    """What ``cells.md.j2`` names: all cells, and the coded ones by percentile, confidence, the published estimator."""
    found = metrics.get("cells") or []
    coded = [cell for cell in found if cell["role"] == "codec"]
    every = {"groups": by_engine(found, costs), "basis": basis([cell["kl_net"] for cell in found])}
    return {
        "cells": every if found else None,
        "percentiles": by_engine(coded, percentiles),
        "by_confidence": by_engine(coded, by_confidence),
        "published": by_engine(coded, published),
    }


CHAPTER = Chapter(
    parts=PARTS,
    entries=lambda measured: {"cells": cell_entries(measured.params, measured.results, measured.boot)},
    sections={
        "cells": PageSection(
            60, "Bits, KL, perplexity and top token of every cell", asks="one change of the codec at a time"
        )
    },
    context=context,
    claims=lambda metrics: claims(metrics.get("cells") or []),
    figures={"cells": Drawn(cells_table, cells)},
    limits=lambda metrics: [("cells, net KL", estimates_of(metrics, "cells", "kl_net"))],
)

"""The cells in the report: every cell, and what one change of the codec costs."""

from __future__ import annotations

from typing import Annotated, Literal

import polars as pl

from kvlab.core.recipe import Attention, DType, Engine, Placement, Protocol, Span, Stream
from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.cells.numbers import cell_entries
from kvlab_pipeline.studies.cells.tables import context
from kvlab_pipeline.studies.chapter import Chapter, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.entries import Compared, Entry, Interval, PValue
from kvlab_pipeline.studies.estimates import claim

# The part ``cells`` of ``metrics.json``: one cell at a time.


class ConfidenceBin(Entry):
    """Mean KL of the tokens on which the uncompressed model gave its top token a probability in [low, high)."""

    low: float
    high: float
    kl: float | None
    n_tokens: int


class CellEntry(Entry):
    """What a cell is, what its codec did, and what it cost beside the same engine and dtype without a codec."""

    cell_id: str
    recipe_id: str
    role: Literal["rerun", "identity", "codec"]
    label: str
    """The entry of params.yaml that it is of."""
    engine: Engine
    dtype: DType
    protocol: Protocol
    stream: Stream
    study: str
    attention: Attention
    placement: Placement
    span: Span
    origin: Engine
    against: str | None
    """The label of the cell that it is to be held against; null for the studied one."""
    difference: Interval | None
    """Net KL minus that of the cell it is held against; null for the studied cell itself and for floors."""
    p_value: Annotated[float, PValue] | None
    """Of the difference, by flipping the signs of windows (of documents, where they are known), in either direction."""
    q_value: Annotated[float, PValue] | None
    """Corrected for all cells that are held against another (Benjamini and Hochberg)."""
    compared: Compared | None
    variance_ratio: float | None
    bits_per_value: float
    """Every stored byte of the scored windows' contexts, uncoded layers included, over the values of K and V."""
    fires: int
    expected_fires: int
    canary_kl: float | None
    d_eff_mean: dict[Literal["k", "v"], float | None]
    outlier_rate: dict[Literal["k", "v"], float | None]
    whitened_error: dict[Literal["k", "v"], float | None]
    kl: Interval
    kl_net: Interval | None
    """KL minus that of the identity cell beside it."""
    delta_nll: Interval
    ppl_ratio: Interval
    published_estimator: Interval
    """The unweighted mean over windows of the signed relative change in perplexity, as the published study has it."""
    effective_tokens: float
    predicted_standard_error: float
    top1_agreement: Interval
    flips_to_wrong: Interval
    flips_to_right: Interval
    kl_percentiles: dict[str, float]
    """KL that the given percentage of tokens stays below."""
    kl_by_confidence: tuple[ConfidenceBin, ...]


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


CHAPTER = Chapter(
    parts={"cells": tuple[CellEntry, ...]},
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

"""The cells in the report: every cell, and what one change of the codec costs."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.cells.numbers import cell_entries
from kvlab_pipeline.studies.cells.tables import context
from kvlab_pipeline.studies.chapter import Chapter, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.tidy import (
    BITS,
    COUNT,
    NATS,
    PROBABILITY,
    RATIO,
    SHARE,
    TOKENS,
    By,
    Compared,
    Estimand,
    Level,
    Several,
)

# What a cell is, what its codec did, and what it cost beside the same engine and dtype without a codec.
CELLS = Several(
    {
        "cell_id": Level(),
        "recipe_id": Level(),
        "role": Level("rerun, identity or codec"),
        "label": Level("the entry of params.yaml that it is of"),
        "engine": Level(),
        "dtype": Level(),
        "protocol": Level(),
        "stream": Level(),
        "study": Level(),
        "attention": Level(),
        "placement": Level(),
        "span": Level(),
        "origin": Level(),
        "against": Level("the label of the cell that it is to be held against; null for the studied one"),
        "difference": Estimand(
            NATS, "net KL minus that of the cell it is held against; null for the studied cell itself and for floors"
        ),
        "p_value": Estimand(
            PROBABILITY,
            "of the difference, by flipping the signs of windows (of documents, where known), in either direction",
        ),
        "q_value": Estimand(
            PROBABILITY, "corrected for all cells that are held against another (Benjamini and Hochberg)"
        ),
        "compared": Compared(),
        "variance_ratio": Level(),
        "bits_per_value": Estimand(
            BITS,
            "every stored byte of the scored windows' contexts, uncoded layers included, over the values of K and V",
        ),
        "fires": Estimand(COUNT),
        "expected_fires": Estimand(COUNT),
        "canary_kl": Estimand(NATS),
        "d_eff_mean": {"k": Estimand(COUNT), "v": Estimand(COUNT)},
        "outlier_rate": {"k": Estimand(SHARE), "v": Estimand(SHARE)},
        "whitened_error": {"k": Estimand(RATIO), "v": Estimand(RATIO)},
        "kl": Estimand(NATS),
        "kl_net": Estimand(NATS, "KL minus that of the identity cell beside it"),
        "delta_nll": Estimand(NATS),
        "ppl_ratio": Estimand(RATIO),
        "published_estimator": Estimand(
            RATIO,
            "the unweighted mean over windows of the signed relative change in perplexity, as the published study's",
        ),
        "effective_tokens": Estimand(TOKENS),
        "predicted_standard_error": Estimand(NATS),
        "top1_agreement": Estimand(SHARE),
        "flips_to_wrong": Estimand(SHARE),
        "flips_to_right": Estimand(SHARE),
        "kl_percentiles": By("percentile", Estimand(NATS, "KL that the given percentage of tokens stays below")),
        # Of the tokens on which the uncompressed model gave its top token a probability in [low, high).
        "kl_by_confidence": Several(
            {"low": Level(), "high": Level(), "kl": Estimand(NATS), "n_tokens": Estimand(TOKENS)}
        ),
    }
)


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
    parts={"cells": CELLS},
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

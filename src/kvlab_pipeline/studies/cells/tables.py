"""Tables of cells, from the part ``cells`` of ``metrics.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.parts import KL_UNIT


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


NAME = ["cell", "protocol", "`variance_ratio`"]


def cells(rows: list[dict]) -> str:
    """What each cell costs and what it stores."""
    lines = [
        [
            *name(row),
            fmt.number(row["bits_per_value"]),
            pair(row["d_eff_mean"]),
            fmt.estimate(row["kl_net"]),
            fmt.estimate(row["difference"], signed=True),
            fmt.number(row["q_value"], 2),
            fmt.estimate(row["ppl_ratio"], 100, 1),
            fmt.estimate(row["top1_agreement"], 100),
            fmt.estimate(row["flips_to_wrong"], 100),
            fmt.estimate(row["flips_to_right"], 100),
        ]
        for row in rows
    ]
    headers = [*NAME, "bits per value", "kept rank, K / V", f"net KL, {KL_UNIT}", "beside its counterpart", "q-value"]
    headers += ["perplexity change, %"]
    headers += ["same top token, %", "right to wrong, %", "wrong to right, %"]
    return fmt.table(headers, lines)


def pair(streams: dict | None) -> str:
    """K and V side by side."""
    values = streams or {}
    return " / ".join(fmt.number(values.get(stream)) for stream in ("k", "v"))


def percentiles(rows: list[dict]) -> str:
    """KL of the ordinary token and of the worst ones."""
    ranks = sorted({rank for row in rows for rank in row["kl_percentiles"]}, key=float)
    lines = [[*name(row), *(fmt.number(row["kl_percentiles"].get(rank)) for rank in ranks)] for row in rows]
    headers = ["median" if float(rank) == 50 else f"{rank} %" for rank in ranks]
    return fmt.table([*NAME, *headers], lines)


def by_confidence(rows: list[dict]) -> str:
    """KL where the uncompressed model was unsure, and where it was sure."""
    edges = sorted({(bin_["low"], bin_["high"]) for row in rows for bin_ in row["kl_by_confidence"]})
    lines = []
    for row in rows:
        found = {(bin_["low"], bin_["high"]): bin_["kl"] for bin_ in row["kl_by_confidence"]}
        lines.append([*name(row), *(fmt.number(found.get(edge)) for edge in edges)])
    headers = [f"{fmt.plain(low)} to {fmt.plain(high)}" for low, high in edges]
    return fmt.table([*NAME, *headers], lines)


def published(rows: list[dict]) -> str:
    """The published study's estimator beside ours."""
    lines = [
        [*name(row), fmt.estimate(row["published_estimator"], 100), fmt.estimate(row["ppl_ratio"], 100, 1)]
        for row in rows
    ]
    headers = [*NAME, "published estimator, %", "perplexity change, %"]
    return fmt.table(headers, lines)


def context(metrics: dict, basis: Basis) -> dict:
    """What ``cells.md.j2`` names: all cells, and the coded ones by percentile, confidence, the published estimator."""
    found = metrics.get("cells") or []
    coded = [cell for cell in found if cell["role"] == "codec"]
    every = {"groups": by_engine(found, cells), "basis": basis([cell["kl_net"] for cell in found])}
    return {
        "cells": every if found else None,
        "percentiles": by_engine(coded, percentiles),
        "by_confidence": by_engine(coded, by_confidence),
        "published": by_engine(coded, published),
    }

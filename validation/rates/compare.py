"""Codecs held against each other: paired ratios at equal bits, and bits at equal KL. Torch-free."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from kvlab.stats.bootstrap import Bootstrap, Column, Estimate

BOOTSTRAP = Bootstrap(resamples=10_000, confidence=0.95, seed=0)
SLACK = 0.03  # bits per value that a codec may take beyond another's and count as taking no more: heads of frames
OURS = ("klt", "archive")
KEEP = ("archive", "kvtc-paper", "aquakv-paper")
"""Codecs of finished caches: no forward can have them."""


def column(row: dict, name: str = "kl") -> Column:
    """A quantity of a row as the bootstrap takes it."""
    sums, counts = (np.array(row[key], dtype=float) for key in (name, "tokens"))
    windows = tuple(range(len(sums)))
    documents = tuple(row["documents"]) if row["documents"] else None
    return Column(sums, counts, windows, f"{row['text']} {row['tokens']}", int(counts.sum()), documents)


def mean(row: dict) -> float:
    """Mean KL, nats per token, without an interval."""
    return sum(row["kl"]) / sum(row["tokens"])


def kl(row: dict) -> Estimate:
    """Mean KL, nats per token."""
    return BOOTSTRAP.mean(column(row)).within(0.0, math.inf)


def agreement(row: dict) -> Estimate:
    """Share of tokens whose most probable successor stays the same."""
    return BOOTSTRAP.rate(column(row, "same"))


def ratio(ours: dict, theirs: dict) -> Estimate:
    """KL of one over that of the other, paired by window."""
    return BOOTSTRAP.ratio(column(ours), column(theirs))


def within_bits(rows: list[dict], codec: str, text: str, bits: float) -> dict | None:
    """A codec's row of the most bits that are no more than these; None where it has none."""
    fitting = [row for row in rows if (row["codec"], row["text"]) == (codec, text) and row["bits"] <= bits + SLACK]
    return max(fitting, key=lambda row: row["bits"], default=None)


def bits_at(rows: list[dict], codec: str, text: str, level: float) -> float | None:
    """Bits at which a codec's KL is `level`, between its rows, log KL straight in bits; None beyond them."""
    mine = (row for row in rows if (row["codec"], row["text"]) == (codec, text))
    curve = sorted((row["bits"], mean(row)) for row in mine)
    for (low, before), (high, after) in pairwise(curve):
        if after <= level <= before and after < before:
            share = math.log(before / level) / math.log(before / after)
            return low + share * (high - low)
    return None


def best_served(rows: list[dict], text: str, nominal: float) -> dict | None:
    """The rival of the least KL among those of a nominal width that can serve."""
    fitting = [
        row for row in rows if row["text"] == text and row["nominal"] == nominal and row["codec"] not in (*OURS, *KEEP)
    ]
    return min(fitting, key=mean, default=None)

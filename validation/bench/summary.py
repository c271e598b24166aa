"""What the page and the figures make of ``bench.json``: means over layers, rates of both streams, KL. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvlab.stats.bootstrap import Bootstrap, Column

PARTS = ("metadata", "mismatch", "allocation", "granular", "shape")
STREAMS = ("k", "v")


def mean(values: Iterable[float | None]) -> float | None:
    """Mean; None when a value is missing."""
    values = list(values)
    return sum(values) / len(values) if values and None not in values else None


def over_layers(source: dict, label: str, stream: str) -> dict | None:
    """Every number of one codec on one stream, mean over layers; None when it was refused."""
    rows = [row for row in source["scores"].get(label, ()) if row["stream"] == stream]
    keys = ("bits", "nmse_db", "above_db", "excess", *PARTS)
    return {key: mean(row[key] for row in rows) for key in keys} if rows else None


def speed(source: dict, label: str, task: str, threads: int) -> float | None:
    """Median MB/s of K and V one after the other."""
    found = source["speed"].get(label, {})
    rates = [found.get(stream, {}).get(task, {}).get(str(threads)) for stream in STREAMS]
    return len(rates) / sum(1 / rate["value"] for rate in rates) if all(rates) else None


def spread(source: dict, label: str) -> float:
    """Largest half distance of the slowest from the fastest round, over the median."""
    found = source["speed"].get(label, {})
    rates = [rate for tasks in found.values() for by in tasks.values() for rate in by.values()]
    return max(((rate["high"] - rate["low"]) / 2 / rate["value"] for rate in rates), default=0.0)


def order(data: dict) -> list[dict]:
    """Subjects by nominal bits, those without any first."""
    return sorted(data["subjects"], key=lambda one: (one["bits"] or 0, one["rival"]))


def family(label: str) -> str:
    """The codec in a label: what stands before the conditioning and the bits."""
    return label.split()[0].split("+")[0]


# ---------------------------------------------------------------------------------------------- KL


def texts(data: dict) -> list[str]:
    """The texts with a KL, the test split first."""
    return sorted({text for found in data["kl"].values() for text in found}, reverse=True)


def column(found: dict) -> Column:
    """KL of one codec on one text, a value per window; every window scores as many tokens as the others.

    Where the documents of the windows were recorded, these are resampled.
    """
    means, documents = np.array(found["windows"]), found.get("documents")
    numbers = tuple(range(means.size))
    documents = documents and tuple(documents)
    return Column(means, np.ones_like(means), numbers, f"windows 0..{means.size - 1}", means.size, documents)


def bootstrap(data: dict) -> Bootstrap:
    """How intervals over windows are made."""
    return Bootstrap(**data["bootstrap"])


def kl(data: dict, label: str, text: str) -> dict | None:
    """Mean KL and its interval; None where it was not measured."""
    found = data["kl"].get(label, {}).get(text)
    return bootstrap(data).mean(column(found)).to_json() if found else None


def kl_ratio(data: dict, label: str, other: str, text: str) -> dict:
    """KL of one codec over that of another on the same windows, with its paired interval."""
    pair = (column(data["kl"][name][text]) for name in (label, other))
    return bootstrap(data).ratio(*pair).to_json()

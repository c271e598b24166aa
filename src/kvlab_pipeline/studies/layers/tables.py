"""Tables of the layer study, from the parts ``layers`` and ``additivity`` of ``metrics.json``."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import KL_UNIT, reading, resolution

MARK = "†"  # put after what is told from zero after the correction for many layers
APART = "‡"  # put after what is told from the mean of the layers, after the same correction
KINDS = {"only": "alone", "but": "left out"}
PRICED = {"k": "each layer's K", "v": "each layer's V", "kv": "K and V of each layer at once"}
NAMES = {"k": "K", "v": "V", "kv": "K and V"}


def by_place(rows: list[dict], alpha: float) -> list[dict]:
    """One table per engine and protocol: ``[{"engine", "protocol", "table"}]``."""
    places = dict.fromkeys((row["engine"], row["protocol"]) for row in rows)
    return [
        {
            "engine": engine,
            "protocol": protocol,
            "table": layers([row for row in rows if (row["engine"], row["protocol"]) == (engine, protocol)], alpha),
        }
        for engine, protocol in places
    ]


def layers(rows: list[dict], alpha: float) -> str:
    """One line per layer: what its K and its V cost alone, and left out."""
    found = {(row["layer"], row["kind"], row["stream"]): row for row in rows}
    columns = list(dict.fromkeys((kind, row["stream"]) for kind in KINDS for row in rows if row["kind"] == kind))
    boundary = {row["layer"]: row["boundary"] for row in rows}
    lines = [
        [place(layer, boundary[layer]), *(cost(found.get((layer, *column)), alpha) for column in columns)]
        for layer in sorted(boundary)
    ]
    return fmt.table(["layer", *(f"{NAMES[stream]} {KINDS[kind]}" for kind, stream in columns)], lines)


def place(layer: int, boundary: bool) -> str:
    """A layer's number, boundary layers named."""
    return f"{layer}, boundary" if boundary else str(layer)


def cost(row: dict | None, alpha: float) -> str:
    """A layer's cost, marked when it is told from zero, and when it is told from the mean of the layers."""
    if row is None:
        return fmt.DASH
    tested = {MARK: row["q_value"], APART: row["q_stands_out"]}
    marks = [mark for mark, q in tested.items() if q is not None and q <= alpha]
    return " ".join([fmt.estimate(row["kl"]), *marks])


def additivity(rows: list[dict]) -> str:
    """What is coded together against the sum of its parts."""
    lines = [
        [
            f"`{row['engine']}`",
            f"`{row['protocol']}`",
            NAMES[row["stream"]] if row["parts"] == "streams" else f"the layers of {NAMES[row['stream']]}",
            *(fmt.estimate(row[key]) for key in ("joint", "sum", "left_out_sum", "ratio", "interaction")),
            reading(resolution(row["interaction"])),
        ]
        for row in rows
    ]
    headers = ["engine", "protocol", "parts", "together", "alone, added up", "left out, added up"]
    return fmt.table([*headers, "ratio to alone", "together minus alone", "reading"], lines)


def boundary(rows: list[dict]) -> str | None:
    """What a boundary layer costs beside another; None where no layer is one, or all are."""
    lines = [
        [
            f"`{row['engine']}`",
            f"`{row['protocol']}`",
            NAMES[row["stream"]],
            fmt.estimate(row["boundary_excess"], signed=True),
            reading(resolution(row["boundary_excess"])),
        ]
        for row in rows
        if row["boundary_excess"]
    ]
    headers = ["engine", "protocol", "stream", f"boundary minus other layer, {KL_UNIT}", "reading"]
    return fmt.table(headers, lines) if lines else None


def context(metrics: dict, basis: Callable[[list[dict]], str]) -> dict | None:
    """Everything that ``layers.md.j2`` names under ``layers``; None when the study was not run.

    Parameters
    ----------
    metrics : dict
    basis : callable
        From Estimates to the line under their table.
    """
    rows, sums = metrics.get("layers"), metrics.get("additivity")
    if not rows:
        return None
    return {
        "priced": " and ".join(PRICED[stream] for stream in dict.fromkeys(row["stream"] for row in rows)),
        "groups": by_place(rows, round(1 - metrics["sizes"]["confidence"], 9)),
        "mark": MARK,
        "apart": APART if any(row["q_stands_out"] is not None for row in rows) else None,
        "left_out": any(row["kind"] == "but" for row in rows),
        "boundary_layers": any(row["boundary"] for row in rows),
        "basis": basis([row["kl"] for row in rows]),
        "additivity": additivity(sums) if sums else None,
        "streams": any(row["parts"] == "streams" for row in sums or []),
        "additivity_basis": basis([row["interaction"] for row in sums or []]),
        "boundary": boundary(sums or []),
    }

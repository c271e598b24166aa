"""Tables of the mitigations, from the part ``mitigations`` of ``metrics.json``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from kvlab.output import format as fmt
from kvlab_pipeline.pages.parts import KL_UNIT, not_resolved

WORDS = {
    "moved": "boundary layers, found from none, no more than before",
    "greedy": "boundary layers, found from none",
    "extended": "boundary layers, extended",
    "hot": "one bit more for K",
    "klt boundary": "`klt`: uncoded layers",
    "klt hot": "`klt`: one bit more for K",
}


def arm(row: dict) -> str:
    """What an arm does, in words; a uniform one by its name."""
    return WORDS.get(row["arm"], row["arm"])


def layers(numbers: list[int]) -> str:
    """Favoured layers; a dash for none."""
    return ", ".join(map(str, numbers)) or fmt.DASH


def chosen(rows: list[dict]) -> str:
    """What each search chose, and its drop in KL on the split that chose it and on the other one."""
    lines = [
        [arm(row), layers(row["layers"]), fmt.number(100 * row["calib"]), fmt.estimate(row["test"], 100)]
        for row in rows
    ]
    headers = ["way to spend", "layers", "KL saved on the calibration split, %", "on the test split, %"]
    return fmt.table(headers, lines)


def path(steps: list[dict]) -> str:
    """A greedy search step by step, from the top."""
    lines = [["none yet", fmt.number(steps[0]["kl"]), fmt.number(steps[0]["bits_per_value"], 4)]]
    for before, after in pairwise(steps):
        new = sorted(set(after["layers"]) - set(before["layers"]))
        lines.append([f"layer {layers(new)}", fmt.number(after["kl"]), fmt.number(after["bits_per_value"], 4)])
    headers = ["left uncoded", f"KL on the calibration split, {KL_UNIT}", "bits per value"]
    return fmt.table(headers, lines)


def by_place(rows: list[dict], table: Callable[[list[dict]], str]) -> list[dict]:
    """One table per engine and protocol: ``engine``, ``protocol``, ``table``."""
    places = dict.fromkeys((row["engine"], row["protocol"]) for row in rows)
    return [
        {
            "engine": engine,
            "protocol": protocol,
            "table": table([row for row in rows if (row["engine"], row["protocol"]) == (engine, protocol)]),
        }
        for engine, protocol in places
    ]


def comparisons(rows: list[dict]) -> str:
    """Every favouring arm against uniform spending."""
    lines = [
        [
            arm(row),
            layers(row["layers"]),
            fmt.number(row["bits_per_value"], 4),
            against(row),
            fmt.estimate(row["ratio"]),
            fmt.estimate(row["difference"], signed=True),
            verdict(row),
        ]
        for row in rows
    ]
    headers = ["way to spend", "layers", "bits per value", "against", "KL, times the other's"]
    return fmt.table([*headers, f"KL minus the other's, {KL_UNIT}", "reading"], lines)


def against(row: dict) -> str:
    """What an arm is held against; its bytes where they are others."""
    if row["beyond"] is None:
        return row["against"]
    return f"{row['against']}, at {fmt.number(row['against_bits_per_value'], 4)} bits per value"


def verdict(row: dict) -> str:
    """Whether an arm is better or worse than uniform spending, and with more bytes or fewer."""
    if row["same"]:
        return "one and the same cell"
    ratio, needed = row["ratio"], row["windows_needed"]
    if not ratio["low"] <= 1 <= ratio["high"]:
        said = "better" if ratio["value"] < 1 else "worse"
    else:
        count = None if needed is None or needed >= fmt.OUT_OF_REACH else fmt.whole(needed)
        said = not_resolved(fmt.largest(ratio, 1.0, 100), count, " %")
    return said + {None: "", "above": "; takes more bytes", "below": "; takes fewer bytes"}[row["beyond"]]


def arms(rows: list[dict]) -> str:
    """What every arm costs."""
    lines = [
        [
            arm(row),
            layers(row["layers"]),
            fmt.number(row["bits_per_value"], 4),
            fmt.estimate(row["kl_net"]),
            fmt.estimate(row["delta_nll"], signed=True),
        ]
        for row in rows
    ]
    return fmt.table(
        ["way to spend", "layers", "bits per value", f"net KL, {KL_UNIT}", f"`delta_nll`, {KL_UNIT}"], lines
    )


def mitigations_context(metrics: dict, basis: Callable[[list[dict]], str]) -> dict | None:
    """Everything that ``mitigations.md.j2`` names under ``mitigations``; None when the study was not run.

    Parameters
    ----------
    metrics : dict
    basis : callable
        From Estimates to the line under their table.
    """
    found = metrics.get("mitigations")
    if not found:
        return None
    choice, rows = found["choice"], found["comparisons"]
    judged = [row["test"] for row in found["generalises"] if row["test"]]
    return {
        "choice": {key: choice[key] for key in ("engine", "dtype", "protocol")},
        "windows": fmt.number(choice["windows"]),
        "budget": fmt.plain(choice["budget"]),
        "chosen": chosen(found["generalises"]),
        "judged": bool(judged),
        "greedy": path(choice["searches"]["greedy"]),
        "comparisons": by_place(rows, comparisons),
        "beyond": any(row["beyond"] == "above" for row in rows),
        "basis": basis([row["difference"] for row in rows if not row["same"]]),
        "arms": by_place(found["arms"], arms),
        "arms_basis": basis([row["kl_net"] for row in found["arms"]]),
    }

"""The first page of FINDINGS.md: what to use, what it costs, whether that is much, and what is open."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from kvlab.core.recipe import ENGINES
from kvlab.output import format as fmt
from kvlab.stats import kl_scale
from kvlab_pipeline.rendering import parts as tables
from kvlab_pipeline.rendering.withheld import TRUTH_ENGINE, undecided
from kvlab_pipeline.report import claims
from kvlab_pipeline.report.use import cut, named, uses
from kvlab_pipeline.studies.factors import chapter as factors

FACTORS = {
    "engine": "which engine runs the model",
    "protocol": "when the cache is coded",
    "variance_ratio": "how much of its sketch's energy the codec's PCA keeps",
    "dtype": "what the engine computes in",
    "origin": "whose capture the codec was calibrated on",
}
LEVELS = {
    "engine": {name: engine.title for name, engine in ENGINES.items()},
    "protocol": {"snapshot": "the finished cache coded", "in_forward": "every layer coded as it is computed"},
}


def context(metrics: dict, claimed: dict | None, told: list[dict], asked: dict[str, str]) -> dict:
    """What ``front.md.j2`` names, as text ready to print; a part that was not measured is None.

    Parameters
    ----------
    metrics : dict
        ``metrics.json`` without what may not be shown.
    claimed : dict or None
        ``claims.json`` of the gate, checked by `certified.context`.
    told : list of dict
        The claims of the page.
    asked : dict of str to str
        What the claims of each section are about, in words.
    """
    found = uses(claimed, (metrics.get("identity") or {}).get("slug"), metrics.get("ladder_state"))
    floor = rounding_floor(metrics)
    return {
        "uses": found,
        "first": next((use["chosen"] for use in found if use["chosen"]), None),
        "floor": floor and floor["what"],
        "scale": scale(metrics, found, floor),
        "words": {"rounding": kl_scale.ROUNDING, "legend": kl_scale.legend()},
        "gap": gap_context(metrics.get("gap"), undecided(metrics) is not None),
        "kept": rank_and_bits(metrics),
        "open": open_table(told, asked),
        "engine": FACTORS["engine"],
    }


# ------------------------------------------------------------------------------------ is that much?


def rounding_floor(metrics: dict) -> dict | None:
    """What bfloat16 costs without any codec: the whole engine where that was measured, else K and V alone."""
    for row in metrics.get("baseline") or []:
        if (row["engine"], row["dtype"]) == (TRUTH_ENGINE, "bfloat16"):
            return {"what": "the engine run in bfloat16 in place of float32", "top": row["top1_agreement"]} | {
                "kl": row["kl"]
            }
    for row in metrics.get("closure") or []:
        if (row["engine"], row["against"], row["stream"], row["dtype"]) == (TRUTH_ENGINE, "cast", "kv", "bfloat16"):
            return {"what": "K and V rounded to bfloat16, no codec", "top": None, "kl": row["measured"]}
    return None


def scale(metrics: dict, found: list[dict], floor: dict | None) -> str | None:
    """KL beside the floor and beside the top token, for the codec of each way and for the published corners."""
    rows = [floor] if floor else []
    for use in found:
        if use["row"] and "kl" in use["row"]["metrics"]:
            measured, what = use["row"]["metrics"], f"{named(use['row'])}: {use['title']}"
            rows.append({"what": what, "kl": measured["kl"], "top": measured.get("top1_agreement")})
    for end, words in (("low", "the published study's low corner"), ("high", "its high corner")):
        cell = corner_cell(metrics, end)
        if cell:
            rows.append({"what": words, "kl": cell["kl"], "top": cell["top1_agreement"]})
    lines = [
        [
            row["what"],
            fmt.estimate(row["kl"]),
            fmt.DASH if row is floor else times(row["kl"], floor and floor["kl"]),
            fmt.estimate(cut(row["top"]), -100, 1),
            level(row, floor),
        ]
        for row in rows
    ]
    headers = ["", f"KL, {tables.KL_UNIT}", "times the floor", "top tokens that change, %", "which is"]
    return fmt.table(headers, lines) if lines else None


def times(kl: dict, floor: dict | None) -> str:
    """A KL as a multiple of the floor's."""
    return fmt.number(kl["value"] / floor["value"], 2) if floor and floor["value"] > 0 else fmt.DASH


def level(row: dict, floor: dict | None) -> str:
    """A KL in words (`kl_scale`), by its interval and the floor."""
    if row is floor:
        return "the floor"
    return kl_scale.span_in_words(row["kl"]["low"], row["kl"]["high"], floor and floor["kl"]["value"])


def corner_cell(metrics: dict, end: str) -> dict | None:
    """The cell of a published corner; None where there is none to be shown."""
    if not metrics.get("gap"):
        return None
    corner = metrics["gap"][end] | {"role": "codec"}
    cells = [c for c in metrics.get("cells") or [] if all(c.get(key) == value for key, value in corner.items())]
    of_factors = [cell for cell in cells if cell.get("study", "factors") == "factors"]
    return of_factors[0] if of_factors else None


# ------------------------------------------------------------------------- the gap, and what is open


def gap_context(gap: dict | None, held: bool = False) -> dict | None:
    """The published gap in words: its two ends, how large it is, and the shares; `held` as in `factors.shares`."""
    if not gap or not gap["factors"] or "kl" not in gap["measures"]:
        return None
    kl = gap["measures"]["kl"]
    lines = [
        [FACTORS.get(part["factor"], part["factor"]), part["share"], part["of_gap"], waiting(part)]
        for part in factors.shares(kl, held)
    ]
    return {
        "low": corner_words(gap["low"], gap["factors"]),
        "high": corner_words(gap["high"], gap["factors"]),
        "gap": fmt.estimate(kl["gap"]),
        "resolved": tables.resolution(kl["gap"])["resolved"],
        "rises": kl["gap"]["value"] > 0,
        "crosses": "engine" in gap["factors"] and len(gap["factors"]) > 1,
        "table": fmt.table(["what differs", f"share, {tables.KL_UNIT}", "of the gap", "reading"], lines),
    }


def rank_and_bits(metrics: dict) -> str | None:
    """What each setting really keeps: directions of K and of V, and bits; None where its PCA is not measured."""
    cells = [corner_cell(metrics, end) for end in ("low", "high")]
    share = ((metrics.get("settings") or {}).get("codec") or {}).get("rank_fraction")
    if share is None or not all(cell and cell["d_eff_mean"]["k"] and cell["d_eff_mean"]["v"] for cell in cells):
        return None
    ends = [
        f"{fmt.number(cell['d_eff_mean']['k'])} directions of K, {fmt.number(cell['d_eff_mean']['v'])} of V and"
        f" {fmt.number(cell['bits_per_value'])} bits for each value"
        for cell in cells
    ]
    return (
        f"The sketch has {fmt.percent(share)} of a head's directions; what lies outside it is lost at both settings."
        f" The first keeps {ends[0]}, the second {ends[1]}: they differ in bytes too."
    )


def waiting(effect: dict) -> str:
    """Whether an effect is settled, as this page says it."""
    return tables.reading(effect).replace("not resolved", "open")


def corner_words(corner: dict, factors: Iterable[str]) -> str:
    """A corner by the factors that vary, in words."""
    return ", ".join(level_words(name, corner[name]) for name in factors)


def level_words(name: str, value: object) -> str:
    """A factor's level in words."""
    if name == "variance_ratio":
        return f"{fmt.percent(value)} of the sketch's energy kept"
    return LEVELS.get(name, {}).get(value) or f"{name} `{value}`"


def open_table(told: list[dict], asked: dict[str, str]) -> str | None:
    """How many effects of each study are settled, how many are open, and what would settle them."""
    lines = []
    for about, group in groupby(told, key=lambda claim: claim["about"]):
        found = list(group)
        waiting = [claim for claim in found if not claims.resolved(claim)]
        reach = [n for claim in waiting if (n := claim["windows_needed"]) is not None and n < fmt.OUT_OF_REACH]
        counts = [fmt.number(len(found)), fmt.number(len(found) - len(waiting)), fmt.number(len(waiting))]
        lines.append([asked.get(about, about), *counts, span(reach)])
    headers = ["study", "effects looked at", "settled", "open", "windows that would settle the open ones"]
    return fmt.table(headers, lines) if lines else None


def span(needed: list[int]) -> str:
    """The least and the most windows of some; a dash when there are none."""
    if not needed:
        return fmt.DASH
    low, high = fmt.whole(min(needed)), fmt.whole(max(needed))
    return low if low == high else f"{low} to {high}"

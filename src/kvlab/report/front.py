"""The first page of FINDINGS.md: what to use, what it costs, whether that is much, and what is open."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from kvlab.base.recipe import WHOLE
from kvlab.gate.summary import BASELINE
from kvlab.pages import format as fmt
from kvlab.pages import parts as tables
from kvlab.pages.markdown import cell as safe
from kvlab.pages.rendering import listing
from kvlab.pages.withheld import TRUTH_ENGINE, undecided
from kvlab.report import claims
from kvlab.stats import kl_scale
from kvlab.studies.factors import tables as factors
from kvlab.studies.ladder.tables import TOLD, length, whole_bits

WORDS = ("certified", "preview", "none")  # of `gate.answer.Answer`, best first
METRICS = {
    "kl": "KL",
    "delta_nll": "the change of the loss",
    "top1_agreement": "the rate of equal top tokens",
    "needle_recall": "the needles found",
}
SHORT = {"kl": "KL", "delta_nll": "loss", "top1_agreement": "top token", "needle_recall": "needles"}
FACTORS = {
    "engine": "which engine runs the model",
    "protocol": "when the cache is coded",
    "variance_ratio": "how much of the energy the codec's PCA keeps",
    "dtype": "what the engine computes in",
    "origin": "whose capture the codec was calibrated on",
}
LEVELS = {
    "engine": {"hf": "transformers", "vllm": "vLLM"},
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
    found = answer(claimed, (metrics.get("identity") or {}).get("slug"))
    floor = rounding_floor(metrics)
    return {
        "use": use_context(found, whole_bits(metrics)),
        "floor": floor and floor["what"],
        "scale": scale(metrics, found, floor),
        "words": {"rounding": kl_scale.ROUNDING, "legend": kl_scale.legend()},
        "gap": gap_context(metrics.get("gap"), undecided(metrics) is not None),
        "open": open_table(told, asked),
        "engine": FACTORS["engine"],
    }


# ------------------------------------------------------------------------------------- what to use


def answer(claimed: dict | None, model: str | None) -> dict | None:
    """The gate's best answer for a model: ``answer``, ``row``, its ``baseline``, and all ``rows`` of its group."""
    given = [one for one in (claimed or {}).get("answers") or [] if one["model"] == model]
    if not given:
        return None
    serving = [one for one in given if not one.get("whole")]  # a model can run with them
    best = min(serving or given, key=lambda one: WORDS.index(one["word"]))
    rows = [row for row in claimed["rows"] if row["model"] == model and row["engine"] == best["engine"]]
    group = [row for row in rows if all(row[key] == best[key] for key in ("protocol", "stored_span"))]
    return {
        "answer": best,
        "row": next((row for row in rows if row["row_id"] == best["row_id"]), None),
        "baseline": next((row for row in rows if row["mechanism"] == BASELINE), None),
        "rows": [row for row in group if row["measured"] and row["mechanism"] != BASELINE],
    }


def use_context(found: dict | None, wholes: dict[str, dict[int, float]]) -> dict | None:
    """The recommendation in words and its table; `wholes` as of `ladder.tables.whole_bits`."""
    if found is None:
        return None
    best, row = found["answer"], found["row"]
    shared = {
        "word": best["word"] if row else WORDS[-1],
        "engine": LEVELS["engine"].get(best["engine"], safe(best["engine"])),
        "protocol": safe(best["protocol"]),
        "tried": fmt.number(best["tried"]),
        "alone": best["tried"] == 1,
        "table": rows_table(found["rows"], wholes),
        "whole": whole_codecs(found["rows"]),
    }
    return shared | (chosen(row, found["baseline"]) if row else {})


def whole_codecs(rows: Iterable[dict]) -> str | None:
    """The codecs of some rows with which no model can run, as they look at all layers of a finished cache."""
    names = dict.fromkeys(f"`{row['mechanism_variant']}`" for row in rows if row["mechanism_variant"] in WHOLE)
    return listing(names) if names else None


def chosen(row: dict, plain: dict | None) -> dict:
    """The recommended row: name, bytes, quality, what is open and how much it was measured on."""
    metrics, before = row["metrics"], (plain or {}).get("metrics") or {}
    held, full = row["bits_per_value"], (plain or {}).get("bits_per_value")
    return {
        "name": named(row),
        "bits": fmt.number(held),
        "of": fmt.number(full) if full else None,
        "times": fmt.number(full / held, 2) if full and held else None,
        "kl": fmt.estimate(metrics.get("kl")),
        "top": rate(metrics.get("top1_agreement")),
        "needles": rate(metrics["needle_recall"]) if "needle_recall" in metrics else None,
        "needles_before": rate(before.get("needle_recall")),
        "open": named_metrics(name for name in row["open"] if name not in row.get("untold", ())),
        "untold": named_metrics(row.get("untold", ())),
        "windows": fmt.number(metrics["kl"]["n"]) if "kl" in metrics else None,
        "on": ", ".join(safe(row[key]) for key in ("device", "dtype") if row[key]),
        "context": fmt.number(row["context_tokens"]),
    }


def named_metrics(names: Iterable[str]) -> str | None:
    """Metrics in words; None where there are none."""
    words = [METRICS.get(name, safe(name)) for name in names]
    return listing(words) if words else None


def rate(given: dict | None) -> str:
    """A rate in per cent."""
    return fmt.estimate(cut(given), 100)


def cut(given: dict | None) -> dict | None:
    """A rate whose interval is cut to what a rate can be."""
    return given and given | {end: min(max(given[end], 0.0), 1.0) for end in ("low", "high")}


def named(row: dict) -> str:
    """A row as a practitioner would call it."""
    name = safe(row["mechanism_variant"] or row["mechanism"])
    return f"{name} at {fmt.number(row['bits'])} bits" if row["bits"] else f"{name}"


def rows_table(rows: list[dict], wholes: dict[str, dict[int, float]]) -> str | None:
    """Every row that was tried beside the recommended one, fewest bits first; no seconds, which differ every time.

    Beside the bits of coded tokens those of whole caches, where the ladder measured the same codec at the same bits.
    """
    known = {row["row_id"]: at for row in rows if (at := wholes.get(rung(row)))}
    ordered = sorted(rows, key=lambda row: (row["bits_per_value"] is None, row["bits_per_value"], row["row_id"]))
    lines = [
        [
            named(row),
            fmt.number(row["bits_per_value"]),
            *(fmt.number(known.get(row["row_id"], {}).get(tokens)) for tokens in TOLD if known),
            fmt.estimate(row["metrics"].get("kl")),
            rate(row["metrics"].get("top1_agreement")),
            standing(row),
        ]
        for row in ordered
    ]
    whole = [f"in all at {length(tokens)}" for tokens in TOLD if known]
    headers = ["codec", "bits per value", *whole, f"KL, {tables.KL_UNIT}", "same top token, %", "may be claimed"]
    return fmt.table(headers, lines) if lines else None


def rung(row: dict) -> str:
    """A row by its name on the ladder."""
    name = row["mechanism_variant"] or row["mechanism"]
    return f"{name} {fmt.plain(row['bits'])}" if row["bits"] else name


def standing(row: dict) -> str:
    """What a row may claim, in words."""
    if row["word"] == "pass" and not row["codes"]:
        return "yes"
    for name in ("beyond", "open"):
        if row[name]:
            found = ", ".join(SHORT.get(key, safe(key)) for key in row[name])
            return f"{'no, loses too much' if name == 'beyond' else 'open'}: {found}"
    return "no: " + ", ".join(safe(code) for code in row["codes"])


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


def scale(metrics: dict, found: dict | None, floor: dict | None) -> str | None:
    """KL beside the floor and beside the top token, for the recommended codec and for the published corners."""
    rows = [floor] if floor else []
    if found and found["row"] and "kl" in found["row"]["metrics"]:
        measured = found["row"]["metrics"]
        rows.append({"what": named(found["row"]), "kl": measured["kl"], "top": measured.get("top1_agreement")})
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


def waiting(effect: dict) -> str:
    """Whether an effect is settled, as this page says it."""
    return tables.reading(effect).replace("not resolved", "open")


def corner_words(corner: dict, factors: Iterable[str]) -> str:
    """A corner by the factors that vary, in words."""
    return ", ".join(level_words(name, corner[name]) for name in factors)


def level_words(name: str, value: object) -> str:
    """A factor's level in words."""
    if name == "variance_ratio":
        return f"{fmt.percent(value)} of the energy kept"
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

"""What to use, from ``claims.json``: for each way in which a cache is coded one recommendation and the rows it is of.

What people serve stands first: the Cache in transformers, coded pages in vLLM. A finished cache that is coded once and
read once is what most papers measure, and costs less; it stands after them and says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvlab.core.recipe import WHOLE
from kvlab.gate.cases import DTYPE_BITS
from kvlab.gate.replay import NOT_REPLAYED
from kvlab.output import format as fmt
from kvlab.output.markdown import cell as safe
from kvlab.output.rendering import listing
from kvlab_pipeline.gate_page import ways
from kvlab_pipeline.gate_page.row_summary import BASELINE, BEST_TIER
from kvlab_pipeline.gate_page.written_table import WORDS
from kvlab_pipeline.rendering import parts as tables
from kvlab_pipeline.studies.ladder.chapter import TOLD, length
from kvlab_pipeline.studies.mechanisms.plan import GREEDY, GREEDY_TOKENS, TASKS
from kvlab_pipeline.studies.mechanisms.plan import METRICS as WRITTEN

NONE = "none"  # of `gate.answer.Answer`
BFLOAT16 = 16  # bits
ROUNDED = 0.025  # of bits, between a rung and a row of the same recipe: heads of pages and positions
METRICS = {
    "kl": "KL",
    "delta_nll": "the change of the loss",
    "top1_agreement": "the rate of equal top tokens",
    "needle_recall": "the needles found",
}
SHORT = {"kl": "KL", "delta_nll": "loss", "top1_agreement": "top token", "needle_recall": "needles"}
SHORT |= dict.fromkeys(TASKS.values(), "RULER") | dict.fromkeys(WRITTEN[GREEDY], "greedy decoding")


def uses(claimed: dict | None, model: str | None, state: Iterable[dict] | None) -> list[dict[str, Any]]:
    """What ``use.md.j2`` names, for each way in which a model's rows are coded, as text ready to print.

    Parameters
    ----------
    claimed : dict or None
        ``claims.json`` of the gate, checked by `certified.context`.
    model : str or None
        Slug.
    state : iterable of dict, optional
        ``ladder_state`` of the metrics: what rungs take with their calibration.
    """
    mine = [one for one in (claimed or {}).get("answers") or [] if one["model"] == model]
    known = {row["label"]: row for row in state or ()}
    found = [_use(answer, claimed["rows"], known) for answer in mine]
    return sorted(found, key=lambda use: (ways.order(use["way"]), use["whole"]))


def _use(answer: dict, rows: list[dict], state: Mapping[str, dict]) -> dict[str, Any]:
    """One recommendation in words, and its table."""
    at = [row for row in rows if all(row[key] == answer[key] for key in ("model", "engine"))]
    plain = next((row for row in at if row["mechanism"] == BASELINE), None)
    way, whole = (answer["protocol"], answer["stored_span"]), bool(answer.get("whole"))
    group = [
        row
        for row in at
        if row["measured"] and row["mechanism"] != BASELINE
        if (row["protocol"], row["stored_span"]) == way and (row["mechanism_variant"] in WHOLE) == whole
    ]
    group.sort(key=lambda row: (row["bits_per_value"] is None, row["bits_per_value"], row["row_id"]))
    row = next((row for row in group if row["row_id"] == answer["row_id"]), None)
    scored = [row for row in group if "kl" in row["metrics"]]
    nearest = min(scored, key=lambda row: row["metrics"]["kl"]["value"], default=None)
    title = ways.title(way, safe(answer["engine"]))
    return {
        "way": way,
        "engine": answer["engine"],
        "title": f"{title}, for caches that are put away" if whole else title,
        "note": " ".join(filter(None, (ways.NOTES.get(way), kept_exact(group)))) or None,
        "word": answer["word"] if row else NONE,
        "tried": fmt.number(answer["tried"]),
        "alone": answer["tried"] == 1,
        "whole": whole,
        "row": row or nearest,
        "table": rows_table(group, state, way == ways.FINISHED),
        "written": written(plain, group),
        "tasks": any(name in row["metrics"] for row in group for name in TASKS.values()),
        "greedy": fmt.number(GREEDY_TOKENS),
        "chosen": chosen(row or nearest, plain) if row or nearest else None,
    }


def kept_exact(rows: list[dict]) -> str | None:
    """How many tokens requests read exact beside coded pages; None where there are no such rows."""
    found = {row["exact_bits"] / DTYPE_BITS[row["dtype"]] for row in rows if row.get("exact_bits")}
    if not found:
        return None
    return (
        f"Beside pages a request keeps {' or '.join(fmt.number(one) for one in sorted(found))} tokens exact, the first"
        " and the newest; bits per value count them in these short windows, in all in caches that are longer."
        " Other rows keep none."
    )


def chosen(row: dict, plain: dict | None) -> dict:
    """A row in words: name, bytes, quality, what is open and how much it was measured on."""
    metrics, before = row["metrics"], (plain or {}).get("metrics") or {}
    held, full = row["bits_per_value"], (plain or {}).get("bits_per_value")
    return {
        "name": named(row),
        "bits": fmt.number(held),
        "of": fmt.number(full) if full else None,
        "times": fmt.number(full / held, 2) if full and held else None,
        "kl": fmt.estimate(above_zero(metrics.get("kl"))),
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


def above_zero(given: dict | None) -> dict | None:
    """A divergence whose interval is cut to what one can be."""
    return given and given | {"low": max(given["low"], 0.0)}


def cut(given: dict | None) -> dict | None:
    """A rate whose interval is cut to what a rate can be."""
    return given and given | {end: min(max(given[end], 0.0), 1.0) for end in ("low", "high")}


def named(row: dict) -> str:
    """A row as a practitioner would call it."""
    name = safe(row["mechanism_variant"] or row["mechanism"])
    if row["engine"] == "vllm" and name.startswith("fp8_"):
        return f"vLLM's own {name}, scale 1"  # the pipeline gives vLLM's cache no scales
    return f"{name} at {fmt.number(row['bits'])} bits" if row["bits"] else f"{name}"


def rows_table(rows: list[dict], state: Mapping[str, dict], finished: bool) -> str | None:
    """Every row of one way; no seconds, which differ every time.

    Beside the bits of coded tokens those of whole caches with the calibration, and from how many tokens on they are
    fewer than bfloat16's, where the ladder knows the codec at these bits.
    """
    known = {row["row_id"]: found for row in rows if (found := state.get(rung(row))) and like(row, found)}
    lines = []
    for row in rows:
        of, metrics = known.get(row["row_id"]), row["metrics"]
        counted = [*(fmt.number(in_all(row, of, tokens, finished)) for tokens in TOLD), pays_from(row, of, finished)]
        lines.append(
            [
                named(row),
                fmt.number(row["bits_per_value"]),
                *(counted if known else ()),
                fmt.estimate(above_zero(metrics.get("kl"))),
                rate(metrics.get("top1_agreement")),
                rate(metrics.get("needle_recall")),
                standing(row),
            ]
        )
    counted = [*(f"in all at {length(tokens)}" for tokens in TOLD), "less than bfloat16 from, tokens"]
    scores = [f"KL, {tables.KL_UNIT}", "same top token, %", "needles found, %"]
    headers = ["codec", "bits per value", *(counted if known else ()), *scores]
    return fmt.table([*headers, "may be claimed"], lines) if lines else None


def rung(row: dict) -> str:
    """A row by its name on the ladder, which knows nothing of pages."""
    name = (row["mechanism_variant"] or row["mechanism"]).removesuffix("_pages").removesuffix("_after")
    return f"{name} {fmt.plain(row['bits'])}" if row["bits"] else name


def like(row: dict, state: dict) -> bool:
    """Whether a row stores what the rung does: a codec that waits for whole blocks holds a tail exactly meanwhile.

    What a request keeps exact beside pages is no part of what a coded token takes, and is counted by itself.
    """
    return abs(of_a_token(row, row["bits_per_value"]) - state["rate"]) <= ROUNDED * state["rate"]


def of_a_token(row: dict, otherwise: float) -> float:
    """Bits per value of a token: in pages what they take of it, else as said `otherwise`."""
    return row.get("page_bits") or otherwise


def in_all(row: dict, state: dict | None, tokens: int, finished: bool) -> float | None:
    """Bits per value of a cache of so many tokens with its calibration.

    Over a finished cache the tokens that come after it are exact and counted; of what is served those are that a
    request keeps exact beside pages.
    """
    if state is None:
        return None
    known = {at["tokens"]: at["bits_per_value"] for at in state["at"]}[tokens]
    if finished:
        return known
    calibration = known - state["rate"] - state["exact_tokens"] * (BFLOAT16 - state["rate"]) / tokens
    return of_a_token(row, state["rate"]) + calibration + (row.get("exact_bits") or 0) / tokens


def pays_from(row: dict, state: dict | None, finished: bool) -> str:
    """The length from which a cache takes less than in bfloat16, calibration and exact tokens counted."""
    if state is None or state["even_with_bfloat16"] is None:
        return fmt.DASH
    at = state["even_with_bfloat16"]
    if not finished:
        calibration = max(0.0, at - state["exact_tokens"]) * (BFLOAT16 - state["rate"])
        at = (calibration + (row.get("exact_bits") or 0)) / (BFLOAT16 - of_a_token(row, state["rate"]))
    return fmt.whole(math.ceil(max(0.0, at)))


def written(plain: dict | None, rows: list[dict]) -> str | None:
    """What is written over a finished cache: RULER's score and greedy decoding, the engine as it is first.

    Of a task that the model is not shown to be able to do without a codec nothing can be told.
    """
    asked = [name for name in WORDS if any(name in row["metrics"] for row in rows)]
    if not asked:
        return None
    items = {name: next(row["metrics"][name]["n"] for row in rows if name in row["metrics"]) for name in asked}
    lines = [
        [
            named(row),
            *(rate(row["metrics"].get(name)) + (" (cannot tell)" if name in row["untold"] else "") for name in asked),
        ]
        for row in ([plain] if plain else []) + rows
        if row["metrics"].keys() & asked
    ]
    return fmt.table(["codec", *(f"{WORDS[name]}, % of {items[name]}" for name in asked)], lines)


def standing(row: dict) -> str:
    """What a row may claim, in words."""
    if row["word"] == "pass" and not row["codes"]:
        return NOT_REPLAYED if row["earned"] == BEST_TIER and not row["certified"] else "yes"
    for name in ("beyond", "open"):
        if row[name]:
            found = ", ".join(dict.fromkeys(SHORT.get(key, safe(key)) for key in row[name]))
            return f"{'no, loses too much' if name == 'beyond' else 'open'}: {found}"
    return "no: " + ", ".join(safe(code) for code in row["codes"])

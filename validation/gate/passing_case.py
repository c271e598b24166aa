"""One case of everything that the gate reads, as plain data, with nothing wrong in it: where corruptions start."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from kvlab.core.recipe import IDENTITY
from kvlab.gate import registry
from kvlab.gate.catalogue.rows import EMBEDDED, EVIDENCE
from kvlab.gate.evidence import build
from kvlab.gate.evidence.measures import carried, change_of, measured, rate_of
from validation.gate import published_rules

MODEL = "reference"
TOKENS, ITEMS = 4096, 400
VALUES, FIRES = 256 * TOKENS * ITEMS, 96 * ITEMS
BACKEND = "kvlab.cache.pages.backend.PagesImpl"
POOL = {
    "block_tokens": 128,
    "block_bytes": 2**14,
    "block_values": 2**15,
    "cache_blocks": 64,
    "cache_memory_bytes": 2**20,
}
"""Pages of 4 bits per value, as many as fit into a MiB."""
PATTERN = "block_sparse:block=32,top_k=4"
IMPORTED = {"harness": "lm-evaluation-harness", "plain": "0a0a", "coded": "c0c0", "differs": {}, "changed": 1} | {
    "unobserved": ["codec"]
}
EVICTION = "attention:percent=25,sinks=4,recent=32"


def valid_case() -> dict[str, Any]:
    """Everything that the gate reads, as plain data, and nothing wrong with it.

    Returns
    -------
    dict
        ``config`` and ``environment``, what a person declares; ``mechanisms`` and ``evals``, the registry's two
        files; ``rows``, objects by a name, each with its evidence; ``current``, what is current now. Every row passes
        the published rules too.
    """
    return copy.deepcopy(_made())


@cache
def _made() -> dict[str, Any]:
    """The case; its intervals are drawn once, since every corruption begins with a case of its own."""
    return {
        "config": _config(),
        "environment": {"MECHANISM": "speculative_decoding", "MECHANISM_VARIANT": "mtp", "DRAFT_MODEL_ID": "draft"}
        | {"SPECULATIVE_ACCEPTANCE_RATE": "0.7", "SPECULATIVE_WASTED_TOKENS": "12"},
        "mechanisms": {"schema_version": registry.SCHEMA_VERSION, "mechanisms": _mechanisms()},
        "evals": {"schema_version": registry.SCHEMA_VERSION, "evals": [_needle(), _fidelity()]},
        "rows": _rows(),
        "current": {MODEL: {"model_hash": "weights", "corpus_hash": "text", "code": "commit"}},
    }


def _config() -> dict[str, Any]:
    return {
        "mechanism": "kv_quantization",
        "mechanism-variant": "fp8_e4m3",
        "compression-ratio": 0.5,
        "compression-overhead-ms": 1.5,
        "quality-eval-id": "needle",
        "mechanism-notes": "per-tensor scales",
        "support-status": "reviewed_preview",
    }


def _mechanisms() -> list[dict[str, Any]]:
    native = ["float32", "bfloat16", "float16"]
    cache = {"kind": "compression", "scope": "kv_cache", "lossless": False, "description": "fewer bits"}
    cache |= {"must_show": ["next_token_distribution", "retrieval"]}
    untouched = {"method": None, "scope": None, "lossless": True, "kv_cache_dtypes": native}
    return [
        {"mechanism": "baseline", "variant": "none", "kind": "baseline", "description": "as it is"} | untouched,
        {"mechanism": "kv_quantization", "variant": "fp8_e4m3", "method": "fp8_e4m3"}
        | {"kv_cache_dtypes": ["fp8", "fp8_e4m3"], "sources": ["arXiv:2209.05433"]}
        | cache,
        {"mechanism": "kv_quantization", "variant": "int", "method": "int", "kv_cache_dtypes": native}
        | {"codecs": ["int"], "evals": ["kv_fidelity"]}
        | cache,
        {"mechanism": "kv_quantization", "variant": "turboquant_class", "method": "turboquant_class"}
        | {"umbrella": True, "kv_cache_dtypes": native, "codecs": ["hadamard"]}
        | cache,
        {"mechanism": "kv_compression", "variant": "klt_pages", "method": "klt_pages", "kv_cache_dtypes": ["uint8"]}
        | {"codecs": ["klt"], "backends": [BACKEND], "evals": ["kv_fidelity"]}
        | cache,
        {"mechanism": "speculative_decoding", "variant": "mtp", "kind": "speculative", "needs_draft": True}
        | {"description": "drafts of its own"}
        | untouched,
        {"mechanism": "compressed_attention", "variant": "block_sparse", "method": "block_sparse"}
        | {"kv_cache_dtypes": native, "patterns": ["block_sparse"], "evals": ["needle"]}
        | cache
        | {"scope": "attention"},
        {"mechanism": "kv_compression", "variant": "eviction", "method": "eviction"}
        | {"kv_cache_dtypes": native, "patterns": ["attention"], "evals": ["needle"]}
        | cache,
    ]


def _needle() -> dict[str, Any]:
    metric = {"key": "needle_recall", "direction": "higher", "margin": 0.05, "floor": 0.2, "rate": True}
    metric |= _unit("share of needles")
    return {
        "quality_eval_id": "needle",
        "version": "1",
        "harness": "kvlab",
        "task": None,
        "scope": "retrieval",
        "metrics": [metric],
        "baseline_required": True,
        "band": [128, 32768],
        "generates": True,
        "description": "one planted fact for each context",
    }


def _fidelity() -> dict[str, Any]:
    return {
        "quality_eval_id": "kv_fidelity",
        "version": "1",
        "harness": "kvlab",
        "task": None,
        "scope": "next_token_distribution",
        "metrics": [
            {"key": "kl", "direction": "lower", "margin": 0.01, "floor": None, "lowest": 0, "untouched": 0}
            | _unit("nats per token"),
            {"key": "top1_agreement", "direction": "higher", "margin": 0.05, "floor": None, "lowest": 0, "highest": 1}
            | {"untouched": 1}
            | _unit("share of tokens"),
        ],
        "baseline_required": True,
        "band": [1, 8192],
        "generates": False,
        "description": "how far the distribution of the next token moves",
    }


def _unit(name: str) -> dict[str, str]:
    return {"unit": name, "why": "the case's own"}


def _rows() -> dict[str, dict[str, Any]]:
    needle = {"quality_eval_id": "needle", "quality_eval_status": "completed"}
    fp8 = {"mechanism": "kv_quantization", "mechanism_variant": "fp8_e4m3", "compression_method": "fp8_e4m3"}
    fp8 |= {"compression_scope": "kv_cache", "compression_ratio": 0.5} | _observed("fp8_e4m3", 8)
    coded = {"mechanism": "kv_quantization", "fires": FIRES, "expected_fires": FIRES}
    fidelity = {"quality_eval_id": "kv_fidelity", "quality_eval_status": "completed", "kl": 0.002}
    rows = {
        "baseline": {"mechanism": "baseline", "recipe_id": IDENTITY.recipe_id} | _observed("bfloat16", 16),
        "fp8": fp8 | needle,
        "int": coded
        | {
            "mechanism_variant": "int",
            "codec": "int",
            "calibration": "fit",
            "compression_ratio": 0.3,
            "bits_per_value": 4.8,
            "bits": 4,
            "stored_span": "context",
        }
        | _observed("bfloat16", 4.8)
        | fidelity,
        "pages": coded
        | {"mechanism": "kv_compression", "mechanism_variant": "klt_pages", "codec": "klt", "backend": BACKEND}
        | {"calibration": "fit", "compression_ratio": 0.25, "protocol": "in_forward"}
        | _observed("uint8", 4)
        | POOL
        | {"capacity_tokens": 64 * 128}
        | fidelity,
        "class": coded
        | {"mechanism_variant": "turboquant_class", "codec": "hadamard", "mechanism_notes": "kvlab hadamard"}
        | _observed("bfloat16", 4)
        | needle,
        "mtp": {"mechanism": "speculative_decoding", "mechanism_variant": "mtp", "draft_model_id": "draft"}
        | {"speculative_acceptance_rate": 0.7}
        | _observed("bfloat16", 16)
        | needle
        | {"spec_decoding": "mtp"},
        "sparse": {"mechanism": "compressed_attention", "mechanism_variant": "block_sparse"}
        | {"compression_scope": "attention", "pattern": PATTERN, "read_bytes": VALUES // 4}
        | _observed("bfloat16", 16.25)
        | needle,
        "evicted": {"mechanism": "kv_compression", "mechanism_variant": "eviction", "compression_ratio": 0.3125}
        | {"compression_scope": "kv_cache", "pattern": EVICTION, "read_bytes": 5 * VALUES // 8}
        | _observed("bfloat16", 5)
        | needle,
        "preview": fp8 | needle | {"support_status": "reviewed_preview", "quality_eval_status": "pending"},
        "recorded": fp8 | needle | {"support_status": "reviewed_preview", "quality_eval_status": "pending"},
    }
    rows = {name: _identity(name) | {"row_id": name} | row for name, row in rows.items()}
    for name, row in rows.items():
        row[EVIDENCE] = [_evidence(row, name, told) for told in _shown(row)]
    rows["recorded"][EMBEDDED] = published_rules.published_record(rows["recorded"])
    return rows


def _identity(name: str) -> dict[str, Any]:
    return {
        "support_status": "supported",
        "model": MODEL,
        "model_hash": "weights",
        "engine": "vllm",
        "device": "cpu",
        "dtype": "bfloat16",
        "protocol": "snapshot",
        "context_tokens": TOKENS,
        "context_band": "4k",
        "corpus_hash": "text",
        "recipe_id": f"recipe-{name}",
        "code": "commit",
    }


def _observed(dtype: str, bits: float) -> dict[str, Any]:
    counted = {"kv_bytes": round(bits * VALUES / 8), "kv_values": VALUES}
    return {"kv_cache_dtype": dtype, "cache_class": "PagedCache", "spec_decoding": "none"} | counted


OPEN = ("preview", "recorded")
"""Rows whose evidence leaves open what they lose."""
TESTED = 9
STEPS = 7
"""For how many levels after the first a loss stays inside its margin: one fewer is too few for Holm of so many rows."""


def _shown(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Which evals a row shows, that which it names first: a compression has to show both."""
    named = row.get("quality_eval_id", "kv_fidelity")
    evals = sorted(("needle", "kv_fidelity"), key=lambda name: name != named)
    evals = evals[:1] if row["mechanism"] in ("baseline", "speculative_decoding") else evals
    return [{"quality_eval_id": name, "evals": evals} for name in evals]


def _evidence(row: dict[str, Any], name: str, shown: dict[str, Any]) -> dict[str, Any]:
    """Evidence of a row with a small loss, well inside its margin or reaching across it; of the baseline with none."""
    keys = ("model", "model_hash", "engine", "device", "dtype", "protocol", "context_tokens", "corpus_hash", "code")
    identity = {key: row[key] for key in keys} | {"versions": {"kvlab": "0"}, "calibration": row.get("calibration")}
    observed = {key: row[key] for key in ("kv_cache_dtype", "cache_class", "kv_bytes", "kv_values")}
    observed |= {"codec": row.get("codec"), "fires": row.get("fires", 0), "expected_fires": row.get("fires", 0)}
    observed |= {"canary_kl": 2.0 if row.get("codec") or row.get("pattern") else None}
    observed |= {name: row.get(name) for name in ("pattern", "read_bytes", "bits")} | {"span": row.get("stored_span")}
    observed |= {"spec_decoding": None if row["spec_decoding"] == "none" else row["spec_decoding"]}
    if row.get("backend"):
        served = {"recipe_id": row["recipe_id"], "calibration": row["calibration"]}
        observed |= {"backend": row["backend"], "pool": {key: row[key] for key in POOL}, "served": served}
    return build(
        version="1",
        **shown,
        **(_recall() if shown["quality_eval_id"] == "needle" else _divergence(name)),
        identity=identity | {"recipe_id": row["recipe_id"]},
        observed=observed,
        baseline_recipe_id=IDENTITY.recipe_id,
        baseline_identity=identity | {"recipe_id": IDENTITY.recipe_id},
        family={"run": "run", "tested": TESTED},
    ).model_dump(mode="json")


def _recall() -> dict[str, Any]:
    """One needle of `ITEMS` is lost."""
    found = {"metrics": rate_of(0.9 * ITEMS - 1, ITEMS), "baseline": rate_of(0.9 * ITEMS, ITEMS)}
    found |= {"paired": change_of(0, 1, ITEMS)}
    return {part: {"needle_recall": measure.model_dump(mode="json")} for part, measure in found.items()}


def _divergence(name: str) -> dict[str, Any]:
    if name == "baseline":
        same = {"kl": measured([0.0] * ITEMS, False), "top1_agreement": measured([1.0] * ITEMS, False)}
        nothing = {key: measured([0.0] * ITEMS, False) for key in same}
        found = {"metrics": same, "baseline": same, "paired": nothing}
        return {part: {key: m.model_dump(mode="json") for key, m in one.items()} for part, one in found.items()}
    steps = -1 if name in OPEN else STEPS
    lost = {"kl": _measure(0.002, 0.001, 0.0005, steps)}
    return {
        "metrics": lost | {"top1_agreement": _measure(0.984375, 0.00390625, 0.001953125)},
        "baseline": {"kl": _measure(0.0, 0.0, 0.0), "top1_agreement": _measure(1.0, 0.0, 0.0)},
        "paired": lost | {"top1_agreement": _measure(-0.015625, 0.00390625, 0.001953125, steps + 1)},
    }


def _measure(value: float, side: float, se: float, steps: int | None = None) -> dict[str, Any]:
    """A measure that keeps its interval for `steps` levels more, and reaches far beyond any margin from there on."""
    found = {"value": value, "low": value - side, "high": value + side, "se": se, "n": ITEMS}
    if steps is None:
        return found
    sides = [side if step <= steps else 1.0 for step in range(len(carried(ITEMS)))]
    ends = {"lows": [value - one for one in sides], "highs": [value + one for one in sides]}
    return found | ends | {"low": ends["lows"][0], "high": ends["highs"][0]}

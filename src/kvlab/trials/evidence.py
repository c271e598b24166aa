"""What was measured of formats, as rows that `kvlab gate check` judges, each with its evidence.

A row says what was seen: the format's bytes, coded by kvlab in the attention of transformers. It claims `gated` and no
more, as the gate asks a compression for retrieval too, of which nothing is measured here; evidence of needles for the
same recipe may be attached, and the claim raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl

from kvlab.advice.choice import Setting
from kvlab.advice.serving import ServingEngine
from kvlab.core.recipe import digest
from kvlab.evals.evidence import code, declared_codec
from kvlab.gate import registry
from kvlab.gate.cases import DTYPE_BITS
from kvlab.gate.catalogue import EVIDENCE
from kvlab.gate.evidence import BASELINE_RECIPE, build, measured, paired
from kvlab.trials.advised import SettingCost
from kvlab.trials.bench import FormatBench

FIDELITY = "kv_fidelity"
MEASURING = ("codecs", "engines", "calibration", "cache", "measure", "stats", "text", "trials")
"""Packages whose code decides a KL."""
UNTOUCHED = {"kl": 0.0, "delta_nll": 0.0, "top1_agreement": 1.0}
"""What the model has of each metric without a format, by definition."""


def gate_rows(
    bench: FormatBench, facts: dict, taken: Iterable[tuple[ServingEngine, Setting, SettingCost]]
) -> list[dict[str, Any]]:
    """A row for each setting of an engine with what was measured of it.

    Parameters
    ----------
    facts : dict
        See `bench.facts_of`.
    taken : iterable of (ServingEngine, Setting, SettingCost)
    """
    known = registry.load()
    info, held = bench.engine.info, bench.engine.storage
    shared = {
        "model": info.slug,
        "model_hash": info.model_hash,
        "engine": bench.engine.name,
        "device": bench.engine.device,
        "dtype": bench.engine.dtype,
        "context_tokens": bench.context,
        "corpus_hash": facts["text_hash"],
        "code": code(MEASURING),
    }
    rows = []
    for engine, setting, found in taken:
        cell, coding = found.scored.variant.cell, found.scored.cost.coding
        declared = declared_codec(known, cell.recipe, recipe_id_of(cell.recipe.recipe_id, cell.layers, info.n_layers))
        fitted = digest(facts["calibration"]) if bench.read_by(setting) else None
        same = shared | {"protocol": cell.protocol, "calibration": fitted}
        seen = {
            "kv_cache_dtype": held.dtype,
            "cache_class": held.cache,
            "codec": declared.codec,
            "fires": coding.fires,
            "expected_fires": coding.expected_fires,
            "kv_bytes": coding.coded_bytes + coding.raw_bytes,
            "kv_values": coding.values,
        }
        scores = scores_of(found.scored.tokens)
        metrics = {name: measured(each, rate=False) for name, each in scores.items()}
        identity = same | {"versions": facts["versions"]}
        evidence = build(
            quality_eval_id=FIDELITY,
            version=known.eval(FIDELITY).version,
            metrics=metrics,
            baseline={name: measured([UNTOUCHED[name]] * len(each), rate=False) for name, each in scores.items()},
            paired={name: paired(each, [UNTOUCHED[name]] * len(each), rate=False) for name, each in scores.items()},
            identity=identity | {"recipe_id": declared.recipe_id},
            observed=seen | {"canary_kl": bench.heard[cell.protocol, cell.placement], "span": cell.span},
            evals=(FIDELITY,),
            family={"run": digest(shared), "tested": bench.tested},
            baseline_recipe_id=BASELINE_RECIPE,
            baseline_identity=identity | {"recipe_id": BASELINE_RECIPE},
        )
        own = {
            "row_id": f"{info.slug}/{engine.name}/{setting.name}",
            "run": digest(shared),
            "support_status": "gated",
            "mechanism": declared.mechanism.mechanism,
            "mechanism_variant": declared.mechanism.variant,
            "mechanism_notes": f"{setting.name} of {engine.name} {engine.version}, measured in transformers",
            "compression_method": declared.mechanism.method,
            "compression_scope": declared.mechanism.scope,
            "compression_ratio": coding.bits_per_value / DTYPE_BITS[bench.engine.dtype],
            "quality_eval_id": FIDELITY,
            "recipe_id": declared.recipe_id,
            "bits_per_value": coding.bits_per_value,
            "stored_span": cell.span,
            "spec_decoding": "none",
        }
        own |= {name: measure.value for name, measure in metrics.items()}
        rows.append(same | seen | own | {EVIDENCE: [evidence.model_dump(mode="json")]})
    return rows


def recipe_id_of(recipe_id: str, coded: tuple[int, ...], layers: int) -> str:
    """The id of a recipe; another one where it codes some of a model's layers alone."""
    return recipe_id if len(coded) == layers else digest({"recipe_id": recipe_id, "layers": list(coded)})


def scores_of(tokens: pl.DataFrame) -> dict[str, list[float]]:
    """Of each window, in their order: mean KL and loss of likelihood, nats per token, and share of equal top tokens."""
    by_window = tokens.group_by("window").agg(
        pl.col("kl").mean(),
        (pl.col("nll_alt") - pl.col("nll_ref")).mean().alias("delta_nll"),
        (pl.col("top1_ref") == pl.col("top1_alt")).mean().alias("top1_agreement"),
    )
    return by_window.sort("window").select(*UNTOUCHED).to_dict(as_series=False)

"""Evidence for the gate, and the row that it belongs to. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kvlab
from kvlab.core.errors import CapabilityError, CodecNotActive, UnknownName
from kvlab.core.recipe import Recipe, digest
from kvlab.core.records import file_hash
from kvlab.evals.backend import CacheUse
from kvlab.evals.results import EvalMeasures
from kvlab.gate.evidence import BASELINE_RECIPE, Evidence, build
from kvlab.gate.registry import Eval, Mechanism, Registry

NATIVE_BITS = {"float32": 32, "bfloat16": 16}
MEASURING = ("codecs", "engines", "calibration", "cache", "evals")  # packages whose code decides an answer


class Declared(NamedTuple):
    """What is done to the cache, as the gate's registry names it.

    Parameters
    ----------
    mechanism : Mechanism
    codec : str or None
        The codec that should run; None where the engine stores fewer bits by itself.
    recipe_id : str
    """

    mechanism: Mechanism
    codec: str | None
    recipe_id: str


class HarnessRun(NamedTuple):
    """One run of an eval: on what, what was seen of the variant's cache, how fast it wrote.

    `identity` holds what both sides share: all fields of `kvlab.gate.evidence.record.EvidenceIdentity` but `recipe_id`.
    """

    entry: Eval
    declared: Declared
    identity: dict[str, Any]
    kv_cache_dtype: str
    cache_class: str
    seen: CacheUse
    throughput: float | None


def declared_codec(registry: Registry, recipe: Recipe, recipe_id: str) -> Declared:
    """The registered mechanism of a recipe.

    Raises
    ------
    CapabilityError
        K and V have different codecs, or none, which no registered mechanism stands for.
    UnknownName
        No mechanism names the codec.
    """
    codecs = sorted({recipe.k.codec, recipe.v.codec} - {"identity"})
    if len(codecs) != 1:
        said = f"K by {recipe.k.codec} and V by {recipe.v.codec}"
        raise CapabilityError(f"the recipe codes {said}; a row of the gate names one codec, take one for both")
    found = [entry for entry in _compressing(registry) if codecs[0] in entry.codecs]
    if not found:
        known = {codec for entry in _compressing(registry) for codec in entry.codecs}
        raise UnknownName("codec of the gate's registry", codecs[0], known)
    return Declared(found[0], codecs[0], recipe_id)


def declared_dtype(registry: Registry, dtype: str) -> Declared:
    """The registered mechanism of an engine's own cache dtype; `UnknownName` when there is none."""
    found = [entry for entry in _compressing(registry) if entry.variant == dtype and dtype in entry.kv_cache_dtypes]
    if not found:
        known = {entry.variant for entry in _compressing(registry) if entry.variant in entry.kv_cache_dtypes}
        raise UnknownName("cache dtype of the gate's registry", dtype, known)
    return Declared(found[0], None, digest({"kv_cache_dtype": dtype}))


def _compressing(registry: Registry) -> list[Mechanism]:
    entries = registry.mechanisms.values()
    return [entry for entry in entries if entry.kind == "compression" and not entry.umbrella and not entry.deprecated]


def code(packages: Sequence[str] = MEASURING) -> str:
    """Digest of the code that decides an answer, which lies in these packages of kvlab's."""
    root = Path(kvlab.__file__).parent
    files = sorted(path for name in packages for path in (root / name).rglob("*.py"))
    return file_hash(*files, root / "core" / "recipe.py")


def evidence(run: HarnessRun, measures: Mapping[str, EvalMeasures]) -> Evidence:
    """What the gate reads of a run.

    Raises
    ------
    CodecNotActive
        The codec fired less often than it should have.
    """
    seen = run.seen
    if run.declared.codec is not None and (seen.fires == 0 or seen.fires != seen.expected_fires):
        raise CodecNotActive(
            f"{run.declared.codec} fired {seen.fires} times and should have fired {seen.expected_fires} times"
        )
    return build(
        quality_eval_id=run.entry.quality_eval_id,
        version=run.entry.version,
        metrics={key: found.variant for key, found in measures.items()},
        baseline={key: found.baseline for key, found in measures.items()},
        paired={key: found.paired for key, found in measures.items()},
        identity=run.identity | {"recipe_id": run.declared.recipe_id},
        observed={
            "kv_cache_dtype": run.kv_cache_dtype,
            "cache_class": run.cache_class,
            "codec": run.declared.codec,
            **seen._asdict(),
        },
        evals=(run.entry.quality_eval_id,),
        family={"run": digest(run.identity | {"eval": run.entry.quality_eval_id}), "tested": 1},
        baseline_recipe_id=BASELINE_RECIPE,
        baseline_identity=run.identity | {"recipe_id": BASELINE_RECIPE},
    )


def row(run: HarnessRun, claim: str) -> dict[str, Any]:
    """The row of the gate that the evidence belongs to; `bits_per_value` counts every stored byte."""
    mechanism, seen = run.declared.mechanism, run.seen
    shown = {key: value for key, value in run.identity.items() if key != "versions"}
    found = {
        "mechanism": mechanism.mechanism,
        "mechanism_variant": mechanism.variant,
        "compression_method": mechanism.method,
        "compression_scope": mechanism.scope,
        "compression_ratio": seen.bits_per_value / NATIVE_BITS[run.identity["dtype"]],
        "quality_eval_id": run.entry.quality_eval_id,
        **shown,
        "recipe_id": run.declared.recipe_id,
        "support_status": claim,
        "kv_cache_dtype": run.kv_cache_dtype,
        "cache_class": run.cache_class,
        "codec": run.declared.codec,
        "spec_decoding": "none",
        "bits_per_value": seen.bits_per_value,
        **seen._asdict(),
    }
    return found if run.throughput is None else found | {"throughput_tok_s": run.throughput}

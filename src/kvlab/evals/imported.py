"""Evidence from two runs of lm-evaluation-harness that somebody else made: plain, and with a compressed cache.

What the harness writes under ``--output_path DIR --log_samples`` is read: ``results_DATE.json`` and, for each task,
``samples_TASK_DATE.jsonl``, a line for each item and filter. The two runs have to be of the same harness, engine,
model, tasks, items and prompts; their samples have to be those that their results were made of.

What the harness does not write is not filled in. Nobody looked at the cache, so such evidence names no codec, no bytes
and no recipe, says so (`kvlab.gate.evidence.Imported`), and certifies nothing: the gate takes from it that too much is
lost, never that little is (`kvlab.gate.evidence.faults`). Torch-free; the harness itself need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.core.errors import ParamsError, UnknownName
from kvlab.core.recipe import digest
from kvlab.core.records import file_hash
from kvlab.evals.alike import arguments, changed_answers, difference, refuse_other_items
from kvlab.evals.logged import Logged, read
from kvlab.evals.results import EvalMeasures, ResultError, corpus_hash, measures, needs_context
from kvlab.evals.tasks import HARNESS, harness_eval
from kvlab.gate.evidence import BASELINE_RECIPE, UNOBSERVED, Evidence, Imported, build
from kvlab.gate.registry import Eval, Mechanism, Registry

UNSEEN = (
    *("model_hash", "protocol", "recipe_id", "baseline_recipe_id", "calibration", "code"),
    *("kv_cache_dtype", "cache_class", "codec", "fires", "kv_bytes", "kv_values", "canary_kl"),
)
"""Fields of evidence that the harness says nothing of."""


class Import(NamedTuple):
    """What came of two runs: the evidence, the row that it belongs to, and each metric's measures."""

    evidence: Evidence
    row: dict[str, Any]
    measures: dict[str, EvalMeasures]


def imported(
    registry: Registry,
    quality_eval_id: str,
    mechanism: str,
    plain: Path,
    coded: Path,
    differs: Iterable[str],
    context_tokens: int,
    claim: str,
) -> Import:
    """Evidence of two runs, and the row that it belongs to.

    Parameters
    ----------
    registry : Registry
    quality_eval_id : str
        A registered eval of lm-evaluation-harness.
    mechanism : str
        What the second run did to its cache, as the registry names it: ``kv_quantization/fp8_e4m3``.
    plain, coded : Path
        A results file, or a folder that holds one at any depth.
    differs : iterable of str
        Arguments of the model by which the two runs may differ.
    context_tokens : int
        Most tokens of an item with its answer, for RULER the length of its texts; the harness does not write it down.
    claim : str
        Tier that the row claims.

    Raises
    ------
    UserError
        A file is missing, damaged, or not of the other run's tasks, items, model or arguments; or the samples are not
        those that the results were made of.
    """
    entry = harness_eval(registry, quality_eval_id)
    declared = _mechanism(registry, mechanism)
    sides = [read(entry, path, context_tokens) for path in (plain, coded)]
    one, other = (side.file for side in sides)
    if file_hash(one) == file_hash(other):
        raise ResultError(f"{one} and {other} are the same run; name the one with the compressed cache too")
    differing = difference(*sides, tuple(differs))
    refuse_other_items(*sides)
    changed = changed_answers(*sides)
    _refuse_length(entry, sides[0], context_tokens)
    found = measures(entry, *(side.result for side in sides), context_tokens)
    evidence = _evidence(entry, sides, found, differing, changed, context_tokens)
    return Import(evidence, _row(evidence, declared, claim), found)


def _mechanism(registry: Registry, name: str) -> Mechanism:
    found = registry.mechanism(*name.partition("/")[::2])
    if found is None or found.kind == "baseline":
        known = [one.name for one in registry.mechanisms.values() if one.kind != "baseline"]
        raise UnknownName("mechanism/variant of the registry", name, known)
    return found


def _refuse_length(entry: Eval, side: Logged, context_tokens: int) -> None:
    """`ParamsError` for a length that the run cannot have had."""
    most = side.said.get("max_length")
    if isinstance(most, int) and context_tokens > most and not needs_context(entry):
        raise ParamsError(
            f"--context-tokens is {context_tokens}, and {side.file} says max_length {most}; give at most it"
        )


def _evidence(
    entry: Eval,
    sides: list[Logged],
    found: Mapping[str, EvalMeasures],
    differing: Mapping[str, tuple[str | None, str | None]],
    changed: int,
    context_tokens: int,
) -> Evidence:
    plain, coded = sides
    files = {"plain": file_hash(plain.file), "coded": file_hash(coded.file)}
    dtype = coded.config.get("model_dtype") or arguments(coded).get("dtype") or UNOBSERVED
    versions = {"lm_eval": coded.said.get("lm_eval_version"), "transformers": coded.said.get("transformers_version")}
    identity = {
        "model": str(coded.said.get("model_name") or UNOBSERVED),
        "model_hash": str(coded.config.get("model_sha") or UNOBSERVED),
        "engine": str(coded.config.get("model") or UNOBSERVED),
        "device": str(coded.config.get("device") or UNOBSERVED),
        "dtype": str(dtype).removeprefix("torch."),
        "protocol": UNOBSERVED,
        "context_tokens": context_tokens,
        "corpus_hash": corpus_hash(coded.result),
        "code": UNOBSERVED,
        "versions": {name: str(said) for name, said in versions.items() if said},
    }
    run = digest(files | {"differs": dict(differing)})
    return build(
        quality_eval_id=entry.quality_eval_id,
        version=entry.version,
        evals=(entry.quality_eval_id,),
        family={"run": run, "tested": 1},
        metrics={key: one.variant for key, one in found.items()},
        baseline={key: one.baseline for key, one in found.items()},
        paired={key: one.paired for key, one in found.items()},
        identity=identity | {"recipe_id": f"{UNOBSERVED}-{run}"},
        observed=dict.fromkeys(("kv_cache_dtype", "cache_class"), UNOBSERVED)
        | dict.fromkeys(("fires", "expected_fires", "kv_bytes", "kv_values"), 0)
        | {"codec": None},
        baseline_recipe_id=BASELINE_RECIPE,
        baseline_identity=identity | {"recipe_id": BASELINE_RECIPE},
        imported=Imported(
            harness=HARNESS,
            **files,
            differs={name: tuple(pair) for name, pair in differing.items()},
            changed=changed,
            unobserved=UNSEEN,
        ),
    )


def _row(evidence: Evidence, declared: Mechanism, claim: str) -> dict[str, Any]:
    """The row that the evidence belongs to; it says nothing of the cache, as nobody looked."""
    shown = evidence.identity.model_dump(exclude={"versions", "calibration"})
    return {
        "mechanism": declared.mechanism,
        "mechanism_variant": declared.variant,
        "compression_method": declared.method,
        "compression_scope": declared.scope,
        "quality_eval_id": evidence.quality_eval_id,
        **shown,
        "support_status": claim,
    }

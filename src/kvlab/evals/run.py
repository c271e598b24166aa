"""One eval, plain and with something done to the cache, on the same items and in the same process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvlab.cache.files.prepared import Prepared, prepared
from kvlab.cache.files.recipe import read_recipe_file
from kvlab.calibration.load import Calibrated
from kvlab.core.errors import CapabilityError, ParamsError
from kvlab.core.model import ModelInfo, load_tokenizer
from kvlab.core.recipe import ENGINES
from kvlab.core.records import atomic, read_json, versions, write_json
from kvlab.engines.capability import check
from kvlab.engines.registry import start
from kvlab.evals.backend import Sides
from kvlab.evals.canary import Guard
from kvlab.evals.evidence import Declared, HarnessRun, code, declared_codec, declared_dtype, evidence, row
from kvlab.evals.lm import CachedLM
from kvlab.evals.results import EvalMeasures, corpus_hash, measures, needs_context
from kvlab.evals.tasks import Tasks, harness_eval
from kvlab.gate.registry import Eval, Registry

NEAR = 0.5  # of the context that is named: as long as some request has to be; those of RULER come much nearer


class EvalRequest(NamedTuple):
    """What a person asks for.

    Parameters
    ----------
    quality_eval_id : str
        A registered eval of lm-evaluation-harness.
    engine, dtype : str
    recipe : Path or None
        A recipe file, or None for a cache dtype.
    cache_dtype : str
        What the engine's own cache is told to hold.
    context_tokens : int or None
        Most tokens of a request with its answer, for RULER the length of its texts; None: what the model can take.
    limit : int or None
        Items of each task; None for all.
    include : Path or None
        Folder of further tasks.
    unsafe, chat : bool
        Whether a task may run what the model wrote; whether prompts go through the model's chat template.
    claim : str
        Tier that the row claims.
    """

    quality_eval_id: str
    engine: str
    dtype: str
    recipe: Path | None
    cache_dtype: str
    context_tokens: int | None
    limit: int | None
    include: Path | None
    unsafe: bool
    chat: bool
    claim: str


@dataclass(frozen=True)
class Outcome:
    """What was found: every metric's measures, and what the variant's cache went through."""

    run: HarnessRun
    measures: dict[str, EvalMeasures]
    cut: int


def run_eval(request: EvalRequest, info: ModelInfo, registry: Registry, out: Path, threads: int) -> Outcome:
    """Ask both sides an eval's items, on so many threads, and write what they said, the evidence and its row.

    Raises
    ------
    UserError
        The eval, its task, its data set or the model is not there, or does not fit the engine.
    CodecNotActive
        An answer does not hang on what is done to the cache.
    MixedIdentity
        The two sides were not asked the same.
    """
    torch.set_num_threads(threads)
    entry = harness_eval(registry, request.quality_eval_id)
    limit = most_tokens(request, entry, info)
    check(
        request.engine,
        request.dtype,
        ENGINES[request.engine].attention,
        info,
        not torch.cuda.is_available(),
        request.cache_dtype,
    )
    tokenizer = load_tokenizer(info)
    ready, declared = subject(request, info, registry)
    tasks = Tasks.load(entry, request.include, made_up(info, request.context_tokens), request.unsafe)
    sides, protocol, device = started(request, info, ready, limit, tokenizer)
    least = int(NEAR * (request.context_tokens or 0))
    coded = CachedLM(sides.variant, tokenizer, limit, least, Guard(sides))
    # first: what cannot be measured is refused before hours pass
    variant = tasks.ask(coded, request.limit, request.chat)
    seen = sides.variant.seen()
    measures(entry, variant, variant, request.context_tokens)  # a metric that is not there is found on the first side
    plain = CachedLM(sides.plain, tokenizer, limit, least)
    baseline = tasks.ask(plain, request.limit, request.chat)
    found = measures(entry, baseline, variant, request.context_tokens)
    identity = {
        "model": info.slug,
        "model_hash": info.model_hash,
        "engine": request.engine,
        "device": device,
        "dtype": request.dtype,
        "protocol": protocol,
        "context_tokens": request.context_tokens or max(coded.longest, plain.longest),
        "corpus_hash": corpus_hash(variant),
        "code": code(),
        "versions": versions() | {"lm_eval": metadata.version("lm_eval")},
    }
    run = HarnessRun(
        entry,
        declared,
        identity,
        sides.variant.kv_cache_dtype,
        sides.variant.cache_class,
        seen,
        coded.written / coded.seconds if coded.written else None,
    )
    write(out, run, found, {"baseline": baseline, "variant": variant}, request.claim)
    return Outcome(run, found, coded.cut)


def most_tokens(request: EvalRequest, entry: Eval, info: ModelInfo) -> int:
    """Most tokens of a request with its answer: as named, or what the model can take.

    Where a metric is of one context length the name is of the texts that are made; what a task puts about them, and
    the answer, come on top.

    Raises
    ------
    ParamsError
        A length is needed, or is more than the model can take.
    """
    named, most = request.context_tokens, info.max_positions
    if named is None and needs_context(entry):
        low, high = entry.band
        raise ParamsError(
            f"{entry.quality_eval_id} is measured at one context length; give it, {low} to {high}: --context-tokens N",
            code="params.no-context",
        )
    if named is not None and named > most:
        raise ParamsError(f"--context-tokens is {named}, and {info.slug} has {most} positions; give at most {most}")
    return most if named is None or needs_context(entry) else named


def made_up(info: ModelInfo, context_tokens: int | None) -> dict[str, Any]:
    """What tasks are told that make up their own texts."""
    lengths = {} if context_tokens is None else {"max_seq_lengths": [context_tokens]}
    return {"tokenizer": str(info.path)} | lengths


def subject(request: EvalRequest, info: ModelInfo, registry: Registry) -> tuple[Prepared | None, Declared]:
    """What is done to the cache: a recipe made ready for the model, or nothing but a dtype, and its registered name."""
    if request.recipe is None:
        return None, declared_dtype(registry, request.cache_dtype)
    file = read_recipe_file(request.recipe)
    if request.engine == "hf" and file.layers is not None:
        raise CapabilityError(
            f"{request.recipe} codes layers {list(file.layers)}; a transformers cache codes all, set null"
        )
    ready = prepared(file, info)
    return ready, declared_codec(registry, ready.recipe, ready.identity)


def started(
    request: EvalRequest, info: ModelInfo, ready: Prepared | None, limit: int, tokenizer
) -> tuple[Sides, str, str]:
    """Both sides and the canaries on an engine, the protocol in which they see a cache, and the device in words."""
    if request.engine not in ("hf", "vllm"):
        raise CapabilityError(
            f"`kvlab eval` runs tasks on hf and vllm, not on {request.engine}", code="capability.no-evals"
        )
    ends = end_tokens(info, tokenizer)
    if request.engine == "hf":
        from kvlab.evals import hf

        engine = start("hf", info, request.dtype, ENGINES["hf"].attention, max_tokens=limit)
        calibration: Calibrated | None = ready.calibration
        return hf.sides(engine, tokenizer, ends, ready.recipe, calibration), hf.PROTOCOL, engine.device
    from kvlab.evals import vllm

    codec = None if ready is None else " and ".join(sorted({ready.recipe.k.codec, ready.recipe.v.codec}))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    sides = vllm.sides(info, request.dtype, limit, ends, request.recipe, codec, request.cache_dtype)
    return sides, vllm.PROTOCOL, device


def end_tokens(info: ModelInfo, tokenizer) -> frozenset[int]:
    """Tokens that end a text: what the model's own settings name, and the tokenizer's."""
    path = info.path / "generation_config.json"
    named = read_json(path).get("eos_token_id") if path.is_file() else None
    listed = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)


def write(out: Path, run: HarnessRun, found: dict[str, EvalMeasures], results: dict[str, dict], claim: str) -> None:
    """Both results, the evidence and the row, evidence last: where it is, everything is."""
    from lm_eval.utils import handle_non_serializable

    proof = evidence(run, found)  # refused before anything is written
    for name in ("evidence.json", "row.json"):
        (out / name).unlink(missing_ok=True)
    for name, result in results.items():
        kept = {key: value for key, value in result.items() if key != "pretty_env_info"}  # that is of the machine
        text = json.dumps(kept, indent=1, ensure_ascii=False, default=handle_non_serializable)
        with atomic(out / f"lm_eval_{name}.json") as temporary:
            temporary.write_text(text, encoding="utf-8")
    write_json(out / "row.json", row(run, claim))
    write_json(out / "evidence.json", proof.model_dump(mode="json"))

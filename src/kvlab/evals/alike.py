"""Two runs of lm-evaluation-harness that may differ in the cache alone: what else they say has to be alike."""

from __future__ import annotations

import json
import re
from typing import Any

from kvlab.core.errors import ParamsError, UserError
from kvlab.evals.logged import OF_ITEM, Logged
from kvlab.evals.results import ResultError
from kvlab.evals.tasks import SCORING

WEIGHTS = ("pretrained", "model", "path", "engine", "peft", "delta", "revision", "subfolder", "tokenizer", "gguf_file")
"""Arguments by which the harness finds a model and its tokenizer: other ones are another model, not another cache."""

OF_RUN = (
    *("lm_eval_version", "transformers_version", "model_source", "model_name", "max_length"),
    *("tokenizer_pad_token", "tokenizer_eos_token", "tokenizer_bos_token", "eot_token_id"),
    *("system_instruction_sha", "fewshot_as_multiturn", "chat_template_sha"),
)
OF_CONFIG = (
    *("model", "model_num_parameters", "model_dtype", "model_revision", "model_sha", "batch_size", "device", "limit"),
    *("gen_kwargs", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed"),
)
OF_TASK = ("versions", "n-shot", "n-samples", "configs")
"""What both results have to say alike: of the run, of its ``config``, and of each task."""

ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def difference(plain: Logged, coded: Logged, declared: tuple[str, ...]) -> dict[str, tuple[str | None, str | None]]:
    """By what arguments of the model the two differ, plain first: those that were declared, and no others."""
    of = [arguments(side) for side in (plain, coded)]
    found = {name: tuple(one.get(name) for one in of) for name in sorted(of[0].keys() | of[1].keys())}
    found = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    for name in declared:
        if name in WEIGHTS:
            raise ParamsError(f"--differs {name} would be another model, not another cache; leave it out")
        if name not in found:
            said = of[0].get(name)
            raise ParamsError(
                f"--differs {name}: model_args of both runs say {name}={said}"
                if said is not None
                else f"--differs {name}: model_args of neither run name it; they name {', '.join(of[0]) or 'nothing'}"
            )
    for name, (one, other) in found.items():
        if name not in declared:
            raise _other(plain, coded, f"model_args {name}", one, other, f", or declare it with --differs {name}")
    for name in OF_CONFIG:
        _refuse_other(plain, coded, f"config.{name}", plain.config.get(name), coded.config.get(name))
    for name in OF_RUN:
        _refuse_other(plain, coded, name, plain.said.get(name), coded.said.get(name))
    if plain.samples.keys() != coded.samples.keys():
        raise _other(plain, coded, "tasks", ", ".join(plain.samples), ", ".join(coded.samples))
    for part in OF_TASK:
        for task in plain.samples:
            one, other = (_comparable(side.said[part].get(task), declared) for side in (plain, coded))
            _refuse_other(plain, coded, f"{part} of {task!r}", one, other)
    return found


def arguments(side: Logged) -> dict[str, str]:
    """What the model was given, by name."""
    given = side.config.get("model_args") or {}
    if isinstance(given, str):
        given = dict(part.partition("=")[::2] for part in given.split(",") if part)
    return {str(name): str(value) for name, value in given.items()}


def _comparable(said: Any, declared: tuple[str, ...]) -> Any:
    """What a task says of itself, without the arguments that may differ and without addresses in memory."""
    if isinstance(said, dict) and isinstance(said.get("metadata"), dict):
        said = said | {"metadata": {name: one for name, one in said["metadata"].items() if name not in declared}}
    return json.loads(ADDRESS.sub("0x", json.dumps(said)))


def _refuse_other(plain: Logged, coded: Logged, name: str, one: Any, other: Any) -> None:
    if isinstance(one, dict) and isinstance(other, dict) and one != other:
        key = next(key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key))
        _refuse_other(plain, coded, f"{name}, {key}", one.get(key), other.get(key))
    if one != other:
        raise _other(plain, coded, name, one, other)


def _other(plain: Logged, coded: Logged, name: str, one: Any, other: Any, more: str = "") -> UserError:
    one, other = (str(said).replace("\n", " ")[:80] for said in (one, other))
    return ResultError(
        f"{name} is {one} in {plain.file} and {other} in {coded.file}: the runs may differ in the cache alone; run one"
        f" of them again{more}"
    )


def refuse_other_items(plain: Logged, coded: Logged) -> None:
    """`ResultError` at the first item that is not on both sides, or was asked otherwise."""
    for task in plain.samples:
        one, other = ({(s["filter"], s["doc_id"]): s for s in side.samples[task]} for side in (plain, coded))
        for key in one.keys() ^ other.keys():
            has, lacks = (plain, coded) if key in one else (coded, plain)
            raise ResultError(
                f"item {key[1]} of task {task!r} is in {has.file} and not in {lacks.file} (filter {key[0]!r}): the runs"
                " were asked other items; run one of them again"
            )
        for key, sample in one.items():
            for name, what in OF_ITEM.items():
                if sample[name] != other[key][name]:
                    raise ResultError(
                        f"item {key[1]} of task {task!r} has another {what} in {plain.file} than in {coded.file}"
                        f" ({name} {str(sample[name])[:12]} and {str(other[key][name])[:12]}); run one of them again"
                    )


def changed_answers(plain: Logged, coded: Logged) -> int:
    """How many answers differ; `ResultError` where not one log-likelihood does, which no codec leaves alone."""
    of = [
        {(task, s["filter"], s["doc_id"]): s.get("resps") for task in side.samples for s in side.samples[task]}
        for side in (plain, coded)
    ]
    changed = sum(of[0][key] != of[1][key] for key in of[0])
    scored = all(plain.said["configs"][task]["output_type"] in SCORING for task in plain.samples)
    if scored and not changed:
        raise ResultError(
            f"all log-likelihoods in {coded.file} are those in {plain.file} to the last digit: nothing was done to a"
            " cache that was read. lm_eval's hf backend scores a text in one pass without a cache; take a task that"
            " generates, or `kvlab eval`"
        )
    return changed

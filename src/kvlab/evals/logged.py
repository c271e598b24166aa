"""One run of lm-evaluation-harness from the files that it wrote, held against themselves. Torch-free.

The harness writes ``results_DATE.json`` and, with ``--log_samples``, ``samples_TASK_DATE.jsonl``
beside it, a line for each item and filter. The samples have to be those that the results were made of: as many, of
the same hashes, with the same means.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.core.errors import MissingResult, StorageError
from kvlab.evals.results import CONTEXT, ResultError, source
from kvlab.evals.tasks import ALLOWED, SCORING
from kvlab.gate.catalogue.strict import read_json
from kvlab.gate.registry import Eval

RESULTS = "results_*.json"
OF_ITEM = {"doc_hash": "document", "prompt_hash": "prompt", "target_hash": "target"}
NEEDED = ("doc_id", "filter", "metrics", *OF_ITEM)


class Logged(NamedTuple):
    """One run: its results file, what that says, and the items of the asked tasks.

    Parameters
    ----------
    file : Path
    said : dict
        The results file.
    samples : dict of str to list of dict
        By task, in the order of its file.
    """

    file: Path
    said: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]

    @property
    def config(self) -> Mapping[str, Any]:
        """How the harness was called."""
        return self.said["config"]

    @property
    def result(self) -> dict[str, Any]:
        """As `lm_eval.evaluator.evaluate` gives it."""
        return {name: self.said[name] for name in ("results", "versions")} | {"samples": self.samples}


def read(entry: Eval, path: Path, context_tokens: int) -> Logged:
    """One run: its results, and the items of an eval's tasks, each held against the results.

    Parameters
    ----------
    entry : Eval
    path : Path
        A results file, or a folder that holds one at any depth.
    context_tokens : int
        The length of RULER's texts, by which it calls its metrics.

    Raises
    ------
    MissingResult
        There is no results file, or none of a task's samples.
    ResultError
        A file is damaged or of another form, or the samples are not those that the results were made of.
    """
    file = _results_file(path)
    said = read_json(file)
    _refuse_shape(file, said)
    tasks = list(dict.fromkeys(_leaves(said["group_subtasks"], entry.task)))
    missing = [task for task in tasks if task not in said["results"] or task not in said["configs"]]
    if missing:
        raise ResultError(
            f"{file} has no task {missing[0]!r}; it has {', '.join(map(repr, said['configs'])) or 'none'}"
        )
    for task in tasks:
        _refuse_kind(entry, file, task, said["configs"][task])
    samples = {task: _samples(file, task) for task in tasks}
    for task, found in samples.items():
        _refuse_other_samples(f"task {task!r} in {file}", said, task, found)
        _refuse_other_means(_keys(entry, said["configs"][task], context_tokens), file, said, task, found)
    return Logged(file, said, samples)


def _results_file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.rglob(RESULTS))
    if not found:
        raise MissingResult(f"{path} holds no {RESULTS}; name what lm_eval was given as --output_path")
    if len(found) > 1:
        raise ResultError(
            f"{path} holds {len(found)} results of lm_eval, {found[0].relative_to(path)} and"
            f" {found[1].relative_to(path)} among them; name the file of one run"
        )
    return found[0]


def _refuse_shape(file: Path, said: object) -> None:
    """`ResultError` for a file that is none of the harness's."""
    mappings = ("results", "configs", "versions", "config", "group_subtasks", "n-shot", "n-samples")
    lacking = [name for name in mappings if not (isinstance(said, dict) and isinstance(said.get(name), dict))]
    if lacking:
        raise ResultError(f"{file} is no results file of lm_eval 0.4.3 or later: it has no object {lacking[0]!r}")


def _leaves(groups: Mapping[str, Any], task: str) -> Iterator[str]:
    """The tasks that a task is made of: itself, where it is no group."""
    parts = groups.get(task)
    if not parts:
        yield task
        return
    rest = {name: listed for name, listed in groups.items() if name != task}  # a group cannot hold itself
    for part in parts:
        yield from _leaves(rest, part)


def _refuse_kind(entry: Eval, file: Path, task: str, config: Mapping[str, Any]) -> None:
    """`ResultError` for answers that would not show what is done to a cache, or are a matter of chance."""
    kind = config.get("output_type")
    if kind not in ALLOWED or (kind not in SCORING) != entry.generates:
        wanted = "generate_until" if entry.generates else " or ".join(SCORING)
        raise ResultError(
            f"task {task!r} in {file} is of the kind {kind!r}; the answers of {entry.quality_eval_id!r} are {wanted}"
        )
    options = config.get("generation_kwargs") or {}
    if kind not in SCORING and (options.get("do_sample") or options.get("temperature")):
        raise ResultError(
            f"task {task!r} in {file} draws its answers (do_sample {options.get('do_sample')}, temperature"
            f" {options.get('temperature')}), and chance would count as damage; run it with --gen_kwargs"
            " do_sample=False,temperature=0"
        )


def _samples(file: Path, task: str) -> list[dict[str, Any]]:
    """The items of a task, from the file that was written beside the results."""
    written = file.stem.rpartition("_")[2]
    path = file.with_name(f"samples_{task}_{written}.jsonl")
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from None
    if lines is None:
        raise MissingResult(f"{path} is not there; run lm_eval with --log_samples, and keep its files together")
    if not any(lines):
        raise ResultError(f"{path} is empty: there are no items to compare")
    return [_sample(path, number, line) for number, line in enumerate(lines, 1) if line]


def _sample(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} line {number} is not JSON: {error}") from None
    lacking = [name for name in NEEDED if not isinstance(found, dict) or name not in found]
    if lacking:
        raise ResultError(f"{path} line {number} has no {lacking[0]!r}; allowed: samples of lm_eval 0.4.3 or later")
    return found


def _refuse_other_samples(at: str, said: Mapping[str, Any], task: str, samples: list[dict[str, Any]]) -> None:
    """`ResultError` where an item is twice or not there, or the results are of other items."""
    seen: set[tuple] = set()
    for sample in samples:
        key = sample["filter"], sample["doc_id"]
        if key in seen:
            raise ResultError(f"{at}: its samples hold item {sample['doc_id']} twice under the filter {key[0]!r}")
        seen.add(key)
    effective = (said["n-samples"].get(task) or {}).get("effective")
    for name, count in Counter(sample["filter"] for sample in samples).items():
        if count != effective:
            raise ResultError(f"{at} is of {effective} items, and its samples hold {count} under the filter {name!r}")
    _refuse_other_hashes(at, said, task, samples)


def _refuse_other_hashes(at: str, said: Mapping[str, Any], task: str, samples: list[dict[str, Any]]) -> None:
    """`ResultError` where a prompt is not the one that its hash is of, or the results are of other items."""
    for sample in samples:
        prompt = _prompt(sample)
        if prompt is not None and _sha256(prompt) != sample["prompt_hash"]:
            raise ResultError(f"{at}: the prompt of item {sample['doc_id']} is not the one that its prompt_hash is of")
    told = (said.get("task_hashes") or {}).get(task)
    found = _sha256("".join(str(sample[name]) for sample in samples for name in OF_ITEM))
    if told != found:
        raise ResultError(
            f"{at}: the results are of other items than the samples beside them (task_hashes {str(told)[:12]}, of the"
            f" samples {found[:12]}); keep the files of one run together, as they were written"
        )


def _prompt(sample: Mapping[str, Any]) -> str | None:
    """What was asked; None where it is no text, as a chat of an API."""
    arguments = sample.get("arguments")
    first = arguments.get("gen_args_0") if isinstance(arguments, dict) else None
    asked = first.get("arg_0") if isinstance(first, dict) else None
    return asked if isinstance(asked, str) else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _keys(entry: Eval, config: Mapping[str, Any], context_tokens: int) -> set[str]:
    """Metrics that are a mean over items: those of the eval, and all others of which the configuration says so."""
    listed = config.get("metric_list") or ()
    means = {one.get("metric") for one in listed if isinstance(one, dict) and one.get("aggregation") == "mean"}
    asked = {source(metric.key)[0] for metric in entry.metrics}
    return means | {str(context_tokens) if name == CONTEXT else name for name in asked}


def _refuse_other_means(
    means: set[str], file: Path, said: Mapping[str, Any], task: str, samples: list[dict[str, Any]]
) -> None:
    """`ResultError` where a mean that the results report is not that of the samples."""
    at = f"task {task!r} in {file}"
    for key, reported in said["results"][task].items():
        name, comma, filtered = key.partition(",")
        if not comma or name not in means:
            continue
        scores = [_score(at, sample, name) for sample in samples if sample["filter"] == filtered]
        mean = math.fsum(scores) / len(scores) if scores else math.nan
        if isinstance(reported, bool) or not isinstance(reported, int | float):
            raise ResultError(f"{at} reports {key} of {reported!r}; allowed: a number")
        if not math.isclose(reported, mean, rel_tol=1e-9, abs_tol=1e-9):
            raise ResultError(
                f"{at} reports {key} of {reported:.9g}, and the mean of its {len(scores)} samples is {mean:.9g}: the"
                " two files are not of one run, or one was changed"
            )


def _score(at: str, sample: Mapping[str, Any], name: str) -> float:
    found = sample.get(name)
    if not isinstance(found, int | float) or not math.isfinite(found):
        raise ResultError(f"{at}: {name} of item {sample['doc_id']} is {found!r}; allowed: a finite number")
    return float(found)

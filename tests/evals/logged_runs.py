"""Files as lm-evaluation-harness writes them with ``--log_samples``: of two runs of one task, and what may be wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

DATES = {"plain": "2026-01-02T03-04-05.000006", "coded": "2026-01-02T04-04-05.000006"}
PLAIN = [1, 1, 1, 0, 1, 1, 0, 1] * 5
CODED = [1, 0, 1, 0, 1, 1, 0, 1] * 5


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sample(number: int, score: float, answer: str, metric: str, filtered: str, kind: str) -> dict:
    prompt, doc = f"Question {number}:", {"question": number}
    resps = [["A text, " + answer]] if kind == "generate_until" else [[[f"-{number}.{answer}", "False"]]]
    return {
        "doc_id": number,
        "doc": doc,
        "target": str(number),
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": " an ending"}},
        "resps": resps,
        "filtered_resps": [resps[0][0]],
        "filter": filtered,
        "metrics": [metric],
        "doc_hash": sha256(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": sha256(prompt),
        "target_hash": sha256(str(number)),
        metric: score,
    }


def run(
    side: str,
    scores: list[float],
    task: str = "toy_chosen",
    metric: str = "acc",
    kind: str = "multiple_choice",
    filters: tuple[str, ...] = ("none",),
) -> dict:
    """A run as data: ``results`` as the harness says it, and ``samples`` by task; `written` puts both into files."""
    samples = [
        sample(number, score, str(number) if side == "plain" else f"{number}1", metric, filtered, kind)
        for filtered in filters
        for number, score in enumerate(scores)
    ]
    mean = sum(scores) / len(scores)
    config = {"task": task, "output_type": kind, "num_fewshot": 0, "metadata": {"version": 1.0, "pretrained": "a/b"}}
    config["metric_list"] = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
    if kind == "generate_until":
        config["generation_kwargs"] = {"do_sample": False, "until": ["\n"]}
    dtype = {"plain": "auto", "coded": "fp8"}[side]
    config["metadata"]["kv_cache_dtype"] = dtype
    results = {
        "results": {task: {"alias": task} | {f"{metric},{name}": mean for name in filters}},
        "group_subtasks": {},
        "configs": {task: config},
        "versions": {task: 1.0},
        "n-shot": {task: 0},
        "n-samples": {task: {"original": 100, "effective": len(scores)}},
        "config": {
            "model": "vllm",
            "model_args": {"pretrained": "a/b", "kv_cache_dtype": dtype},
            "batch_size": "auto",
            "device": "cpu",
            "limit": None,
            "gen_kwargs": None,
            "random_seed": 0,
            "fewshot_seed": 1234,
        },
        "date": 1.0 if side == "plain" else 2.0,
        "lm_eval_version": "0.4.13",
        "transformers_version": "5.19.0",
        "model_name": "a/b",
        "max_length": 512,
        "chat_template_sha": None,
    }
    return {"side": side, "results": results, "samples": {task: samples}}


def written(folder: Path, made: dict, hashed: bool = True, spoil: Callable[[Path], None] | None = None) -> Path:
    """The folder that ``--output_path`` named; `hashed` computes ``task_hashes`` of the samples as they now are."""
    date = DATES[made["side"]]
    here = folder / made["side"] / "a__b"
    here.mkdir(parents=True)
    if hashed:
        made["results"]["task_hashes"] = {
            task: sha256("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples))
            for task, samples in made["samples"].items()
        }
    (here / f"results_{date}.json").write_text(json.dumps(made["results"], indent=2))
    for task, samples in made["samples"].items():
        lines = "".join(json.dumps(one) + "\n" for one in samples)
        (here / f"samples_{task}_{date}.jsonl").write_text(lines)
    if spoil:
        spoil(here)
    return folder / made["side"]


def pair(folder: Path, change: Callable[[dict], None] | None = None, rehash: bool = True, **settings) -> None:
    """Both runs; `change` is made to the coded one, before its files are written."""
    folder.mkdir(parents=True, exist_ok=True)
    written(folder, run("plain", PLAIN, **settings))
    coded = run("coded", CODED, **settings)
    if change and not rehash:
        hashes = run("coded", CODED, **settings)["samples"]
        coded["results"]["task_hashes"] = {
            task: sha256("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples))
            for task, samples in hashes.items()
        }
    if change:
        change(coded)
    written(folder, coded, hashed=rehash or not change)

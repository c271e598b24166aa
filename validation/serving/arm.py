"""One engine under the loads of the page, in a process of its own: ``python -m validation.serving.arm TASK.json``.

Prints ``ANSWER`` and JSON. The task names the model, what the cache holds (`cache`: ``auto``, a dtype of vLLM's, or a
recipe file), its bytes, and which loads to run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def start(task: dict) -> Any:
    """The engine that a task asks for."""
    own = task["cache"]
    if own.endswith((".kv", ".json")):
        os.environ["KVLAB_PAGES"] = own
        own = "auto"
    from vllm import LLM

    return LLM(
        task["model"],
        dtype=task["dtype"],
        kv_cache_dtype=own,
        kv_cache_memory_bytes=task["bytes"],
        enforce_eager=True,
        max_model_len=task["longest"],
        max_num_batched_tokens=1024,
        max_num_seqs=64,
        enable_prefix_caching=task["prefix_caching"],
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )


def sampling(tokens: int):
    """Greedy, exactly so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
    """Seconds that all prompts took at once, and their outputs."""
    before = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling(tokens), use_tqdm=False)
    return time.perf_counter() - before, found


def batches(llm: Any, task: dict) -> list[dict]:
    """Prefill and steps of so many requests at once; the faster of two rounds."""
    found = []
    for size in task["batches"]:
        prompts = task["prompts"][:size]
        rounds = [(generate(llm, prompts, 1)[0], generate(llm, prompts, 1 + task["steps"])[0]) for _ in range(2)]
        prefill, whole = (min(times) for times in zip(*rounds, strict=True))
        found.append({"batch": size, "prefill": prefill, "step": (whole - prefill) / task["steps"]})
    return found


def returning(llm: Any, task: dict) -> dict:
    """Documents that are asked about in turn, and all once more: how long an answer takes when they come back."""
    for ids in task["documents"]:
        generate(llm, [ids], task["answer"])
    seconds, cached = 0.0, 0
    for ids in task["documents"]:
        took, (output,) = generate(llm, [ids], task["answer"])
        seconds, cached = seconds + took, cached + (output.num_cached_tokens or 0)
    tokens = sum(map(len, task["documents"]))
    return {"seconds": seconds / len(task["documents"]), "cached": cached / tokens}


def crowd(llm: Any, task: dict) -> dict:
    """More requests at once than bf16's cache holds."""
    from validation.serving.soak import Served

    served = Served(llm)
    seconds, _ = generate(llm, task["crowd"], task["crowd_tokens"])
    return {"seconds": seconds, "preemptions": served.preemptions}


def quality(llm: Any, task: dict) -> None:
    """Logits of the windows' scored tokens, as a file."""
    import torch

    model, found = llm.apply_model(lambda model: model)[0], []
    length, context = len(task["windows"][0]), task["context"]

    def scored(_model, _inputs, hidden: torch.Tensor) -> None:
        if len(hidden) == length:
            found.append(model.compute_logits(hidden[context - length : -1]).float().cpu())

    handle = model.register_forward_hook(scored)
    for ids in task["windows"]:
        generate(llm, [ids], 1)
    handle.remove()
    if len(found) != len(task["windows"]):
        raise RuntimeError(f"{len(found)} of {len(task['windows'])} windows were computed in one step")
    torch.save(torch.stack(found), task["logits"])


def main() -> None:
    """See the module."""
    os.environ.update(QUIET)
    task = json.loads(Path(sys.argv[1]).read_text())
    llm = start(task)
    cache = llm.llm_engine.vllm_config.cache_config
    answer: dict[str, Any] = {"tokens": cache.num_gpu_blocks * cache.block_size}
    loads = {"batches": batches, "returning": returning, "crowd": crowd, "quality": quality}
    for name in task["loads"]:
        answer[name] = loads[name](llm, task)
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

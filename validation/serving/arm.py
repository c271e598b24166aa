"""One engine under the loads of the page, in a process of its own: ``python -m validation.serving.arm TASK.json``.

Prints ``ANSWER`` and JSON. The task names the model, what the cache holds (`cache`: ``auto``, a dtype of vLLM's, or a
recipe file), its bytes, and which loads to run. Seconds are those that the process had of processors, all its threads
together: other programs, which make a clock worthless, move them by what they take of the processor's caches.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
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
        max_num_batched_tokens=task.get("chunk", 1024),
        max_num_seqs=task.get("most", 64),
        enable_prefix_caching=task["prefix_caching"],
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )


def sampling(tokens: int):
    """Greedy, exactly so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
    """Seconds of the processor that all prompts took at once, and their outputs."""
    before = time.process_time()
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling(tokens), use_tqdm=False)
    return time.process_time() - before, found


def batches(llm: Any, task: dict) -> list[dict]:
    """Prefill and steps of so many requests at once."""
    return [timed(llm.llm_engine, task["prompts"][:size], task["steps"]) for size in task["batches"]]


def timed(engine: Any, prompts: list[list[int]], steps: int) -> dict:
    """Seconds until every request has its first token, and of a step after that, the median of several."""
    prefill = prefilled(engine, prompts)
    after = [stepped(engine)[0] for _ in range(steps)]
    engine.abort_request(names(prompts))
    return {"batch": len(prompts), "prefill": prefill, "step": statistics.median(after)}


def names(prompts: list[list[int]]) -> list[str]:
    """Of requests that come at once."""
    return [f"{len(prompts)}-{number}" for number in range(len(prompts))]


def prefilled(engine: Any, prompts: list[list[int]]) -> float:
    """Seconds until every request has its first token; each then has a token more in every step."""
    for name, ids in zip(names(prompts), prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling(1000))
    begun, total = set(), 0.0
    while len(begun) < len(prompts):
        seconds, outputs = stepped(engine)
        begun |= {output.request_id for output in outputs if output.outputs[0].token_ids}
        total += seconds
    return total


def stepped(engine: Any) -> tuple[float, list[Any]]:
    """Seconds that a step took, and its outputs."""
    before = time.process_time()
    outputs = engine.step()
    return time.process_time() - before, outputs


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
    from validation.serving.soak import SteppedEngine

    served = SteppedEngine(llm)
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
    from kvlab.engines.products import chosen_by_vllm

    task = json.loads(Path(sys.argv[1]).read_text())
    # Where seconds are measured, products with weights stay vLLM's own.
    with chosen_by_vllm() if task["loads"] == ["quality"] else nullcontext():
        llm = start(task)
    cache = llm.llm_engine.vllm_config.cache_config
    answer: dict[str, Any] = {"tokens": cache.num_gpu_blocks * cache.block_size}
    loads = {"batches": batches, "returning": returning, "crowd": crowd, "quality": quality}
    for name in task["loads"]:
        if (found := loads[name](llm, task)) is not None:
            answer[name] = found
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""A person's own program around vLLM with the connector: it answers wishes, a line of JSON each.

It is a process of its own, because a connector belongs to all engines of a process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from typing import TextIO

LIMITS = {"max_model_len": 1024, "max_num_seqs": 20, "max_num_batched_tokens": 4096}
PLAIN = {"enforce_eager": True, "disable_log_stats": True, "skip_tokenizer_init": True, "logprobs_mode": "raw_logits"}


def start(model: str, settings: dict):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(**settings.pop("transfer"))
    return LLM(model, kv_transfer_config=config, **(LIMITS | PLAIN | settings))


def generated(llm, wish: dict) -> dict:
    from vllm import SamplingParams

    from kvlab.kvstore.vllm.connector import counts

    params = [
        SamplingParams(
            max_tokens=wish.get("n", 8),
            temperature=0.0,
            detokenize="stop" in wish,
            stop=wish.get("stop"),
            ignore_eos=True,
            logprobs=-1 if wish.get("vocabulary") else 1,
            prompt_logprobs=wish.get("prompt_logprobs"),
            extra_args={"kv_transfer_params": {"kvlab": wish["asks"]}} if "asks" in wish else None,
        )
        for _ in wish["prompts"]
    ]
    salt = {"cache_salt": wish["salt"]} if "salt" in wish else {}
    in_process = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    before = counts(llm) if in_process else None
    outputs = llm.generate([{"prompt_token_ids": ids, **salt} for ids in wish["prompts"]], params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logits": [
            [step[token].logprob for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
            for o in outputs
        ],
        "vocabulary": [_vocabulary(output) for output in outputs] if wish.get("vocabulary") else None,
        "said": [(output.kv_transfer_params or {}).get("kvlab") for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "counts": dataclasses.asdict(counts(llm) - before) if in_process else None,
    }


def _vocabulary(output) -> list[list[float]]:
    """The logits of every token of the vocabulary, in order, a row for each token of the answer."""
    return [[step[token].logprob for token in range(len(step))] for step in output.outputs[0].logprobs]


def settled(llm, wish: dict) -> dict:
    from kvlab.kvstore.vllm.connector import settle

    settle(llm)
    return {}


def forgotten(llm, wish: dict) -> dict:
    """Empty vLLM's own cache."""
    return {"reset": llm.reset_prefix_cache(reset_connector=wish.get("connector", False))}


def measured(llm, wish: dict) -> dict:
    """vLLM's own counters."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


DEEDS = {"generate": generated, "settle": settled, "forget": forgotten, "measure": measured}


def serve(line: socket.socket) -> None:
    """The first thing said is where and how to start; then a wish a line, an answer a line."""
    said = line.makefile("rw", buffering=1)
    given = json.loads(said.readline())
    os.environ.update(given["environment"])
    say(said, {"pid": os.getpid()})
    try:
        llm = start(given["model"], given["settings"])
    except Exception as error:
        say(said, {"error": type(error).__name__, "message": str(error)})
        return
    say(said, {})
    for wish in map(json.loads, said):
        say(said, DEEDS[wish["do"]](llm, wish))
    llm.llm_engine.engine_core.shutdown()


def say(line: TextIO, answer: dict) -> None:
    line.write(json.dumps(answer) + "\n")
    line.flush()

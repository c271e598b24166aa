"""A person's own program around vLLMs whose pages keep recent tokens exact, each stepped in its own process.

Prints one JSON line: `exact_user.py MODEL RECIPE caching|alone`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from cache.pages.pages_user import PROMPTS, said

BLOCKS, REQUESTS = 10, 16
PREFIX, LENGTH, TOP = 32, 50, 20  # of a prompt that finds its beginning in the prefix cache


def after(llm, ids: list[int]) -> tuple[int, dict[int, float]]:
    """Tokens that a prompt took from the prefix cache, and what comes next: log-probabilities by token."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOP, detokenize=False)
    output = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0]
    return output.num_cached_tokens, {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}


def main() -> None:
    model, recipe, caching = sys.argv[1:]
    os.environ["KVLAB_PAGES"] = recipe
    from vllm import LLM

    from kvlab.cache.vllm_plugin import status
    from validation.serving import soak

    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "enable_prefix_caching": caching == "caching"}
    llm = LLM(model, num_gpu_blocks_override=BLOCKS, max_model_len=224, **(soak.SETTINGS | settings))
    logprobs = [said(llm, ids) for ids in PROMPTS]
    answer = {"logprobs": logprobs, "after": [after(llm, PROMPTS[0][:PREFIX]), after(llm, PROMPTS[0][:LENGTH])]}
    if caching == "alone":
        text = [token * 7 % 300 + 10 for token in range(600)]
        answer["soak"] = dataclasses.asdict(soak.soak(llm, text, REQUESTS))
    answer["status"] = dataclasses.asdict(status(llm))
    print("ANSWER", json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

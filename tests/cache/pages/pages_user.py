"""A person's own program around a vLLM with coded pages, stepped in its own process.

Prints one JSON line: `pages_user.py MODEL RECIPE`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

PROMPTS = [list(range(10, 60)), list(range(100, 190, 2)), list(range(10, 45)) + list(range(200, 220))]
REQUESTS = 16
BLOCKS = 14


def said(llm, ids: list[int]) -> list[float]:
    """Log-probabilities of a prompt's tokens, which vLLM computes in chunks."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    output = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0]
    return [next(iter(p.values())).logprob for p in output.prompt_logprobs[1:]]


def main() -> None:
    model, recipe = sys.argv[1:]
    os.environ["KVLAB_PAGES"] = recipe
    from vllm import LLM

    from kvlab.cache.vllm_plugin import PAGES_BACKEND, place_backend, status
    from validation.serving import soak

    refused = []
    for settings in ({"attention_backend": "FLEX_ATTENTION"}, {"kv_cache_dtype": "fp8_e4m3"}):
        try:
            LLM(model, dtype="float32", max_model_len=64, **settings)
        except Exception as error:
            refused.append([type(error).__name__, str(error)])
    llm = LLM(
        model,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=224,
        **(soak.SETTINGS | {"max_num_batched_tokens": 48, "max_num_seqs": 4}),
    )
    logprobs = [said(llm, ids) for ids in PROMPTS]
    text = [token * 7 % 300 + 10 for token in range(600)]
    found = soak.soak(llm, text, REQUESTS)
    pages = [layer.kv_cache.shape[-1] for layer in llm.apply_model(attentions)[0]]
    config = llm.llm_engine.vllm_config.cache_config
    placed = [backend_path() == PAGES_BACKEND]
    del os.environ["KVLAB_PAGES"]
    place_backend()
    placed.append(backend_path() == PAGES_BACKEND)
    answer = {
        "refused": refused,
        "placed": placed,
        "status": dataclasses.asdict(status(llm)),
        "logprobs": logprobs,
        "soak": dataclasses.asdict(found),
        "bytes": pages,
        "blocks": config.num_gpu_blocks,
    }
    print("ANSWER", json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


def backend_path() -> str:
    """The class that vLLM's CPU platform would take."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CPU_ATTN.get_path()


def attentions(model) -> list:
    """The attention modules of a live model."""
    return [layer.self_attn.attn for layer in model.model.layers]


if __name__ == "__main__":
    main()

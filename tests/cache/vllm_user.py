"""A person's own program around vLLM, with nothing of kvlab's but the variable and the question how it went.

Prints one JSON line per request on stdout: `vllm_user.py MODEL RECIPE_OF_THE_CORE RECIPE_IN_PROCESS`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

SETTINGS = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "disable_log_stats": True}
CHUNK = 16  # tokens of one pass: prompts are cut into several and share passes
PROMPTS = [list(range(10, 40)), list(range(100, 150, 2))]


def serve(model: str) -> None:
    from vllm import LLM, SamplingParams

    from kvlab.cache.vllm_plugin import status

    llm = LLM(model, enforce_eager=True, max_num_batched_tokens=CHUNK, **SETTINGS)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    answer = {
        "status": dataclasses.asdict(status(llm)),
        "generated": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [[next(iter(p.values())).logprob for p in output.prompt_logprobs[1:]] for output in outputs],
    }
    print("ANSWER", json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


def refused_when_compiled(model: str) -> None:
    from vllm import LLM

    try:
        LLM(model, **SETTINGS)
    except Exception as error:
        print("ANSWER", json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)


def main() -> None:
    model, core, in_process = sys.argv[1:]
    os.environ["KVLAB_RECIPE"] = core
    refused_when_compiled(model)
    serve(model)  # the model is in another process, as vLLM does it by itself
    from kvlab.cache.vllm_plugin import activate

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    activate(in_process)  # another recipe, after vLLM has loaded its plugins
    serve(model)


if __name__ == "__main__":
    main()

"""The engines that people serve models with, a file for each."""

from kvlab.advice.serving import ServingEngine
from kvlab.advice.serving_engines import llama_cpp, sglang, tensorrt_llm, transformers, vllm

SERVING: dict[str, ServingEngine] = {
    file.ENGINE.name: file.ENGINE for file in (vllm, llama_cpp, transformers, sglang, tensorrt_llm)
}
"""By the name that `--engine` takes."""

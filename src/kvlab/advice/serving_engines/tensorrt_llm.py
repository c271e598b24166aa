"""TensorRT-LLM: fp8 or nvfp4 for all of K and V, its flag takes no other; scale 1 where a checkpoint names none."""

from kvlab.advice.serving import CacheFormat, ServingEngine

ENGINE = ServingEngine(
    name="tensorrt-llm",
    version="1.4",
    formats=(
        CacheFormat("fp8", "fp8_e4m3", "fp8_e4m3", devices=("cuda",), needs="Ampere, Ada, Hopper or Blackwell"),
        CacheFormat("nvfp4", devices=("cuda",), needs="Blackwell, a checkpoint of ModelOpt", multiple=16),
    ),
    line="trtllm-serve {model} --kv_cache_dtype {option}{skipped}",
    as_read="in_forward",
    held="the published rules alone, with scale 1; no kernel of TensorRT-LLM was run",
    unmeasured="its kernels; scales that ModelOpt calibrates",
    sources=(
        "https://nvidia.github.io/TensorRT-LLM/features/quantization.html (which GPUs)",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/11487 (--kv_cache_dtype)",
    ),
    plain="auto",
)

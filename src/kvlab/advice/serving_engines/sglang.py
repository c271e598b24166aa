"""SGLang: 8-bit floats for K and V of all layers; scale 1 where a checkpoint brings none."""

from kvlab.advice.serving import CacheFormat, ServingEngine

ENGINE = ServingEngine(
    name="sglang",
    version="documentation of October 2026",
    formats=(
        CacheFormat("fp8_e4m3", needs="CUDA: compute capability 8.9 or later"),
        CacheFormat("fp8_e5m2", devices=("cuda",)),
    ),
    line="python -m sglang.launch_server --model-path {model} --kv-cache-dtype {option}{skipped}",
    as_read="in_forward",
    held="the published rule alone: e4m3 and e5m2 of scale 1, to nearest; no kernel of SGLang was run",
    unmeasured="the kernels of the attention backend; its 4-bit floats (fp4_e2m1), which are not measured here",
    sources=("https://docs.sglang.io/docs/advanced_features/quantized_kv_cache",),
    plain="auto",
)

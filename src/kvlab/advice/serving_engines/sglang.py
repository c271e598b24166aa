"""SGLang: floats of 8 or 4 bits for K and V of all layers; those of 8 have scale 1 where a checkpoint brings none.

It has no integers: its documentation names none, and the pull requests that had them (1644, 2864, 3034, and 22004 with
`--int8-kv-cache`) are closed and not marked as merged.
"""

from kvlab.advice.serving import CacheFormat, ServingEngine

ENGINE = ServingEngine(
    name="sglang",
    version="documentation of October 2026",
    formats=(
        CacheFormat("fp8_e4m3", needs="CUDA: compute capability 8.9 or later"),
        CacheFormat("fp8_e5m2", devices=("cuda",)),
        CacheFormat("fp4_e2m1", devices=("cuda",), needs="what its documentation calls experimental", multiple=16),
    ),
    line="python -m sglang.launch_server --model-path {model} --kv-cache-dtype {option}{skipped}",
    as_read="in_forward",
    held="its published rules alone, none of its kernels was run: e4m3 and e5m2 of scale 1, e2m1 by its source",
    unmeasured="the kernels of the attention backend",
    sources=(
        "https://docs.sglang.io/docs/advanced_features/quantized_kv_cache",
        "https://github.com/sgl-project/sglang: python/sglang/srt/layers/quantization/kvfp4_tensor.py (0dae407b)",
    ),
    plain="auto",
)

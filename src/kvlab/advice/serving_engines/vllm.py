"""vLLM: one format for K and V together, single layers may be left in 16 bits."""

from functools import partial

from kvlab.advice.own import own_formats
from kvlab.advice.serving import CacheFormat, ServingEngine

ADA = "CUDA: compute capability 8.9 or later"
FLASHINFER = "FlashInfer, compute capability 8, 9, 10 or 12; heads of 64 on 10 alone, and no attention sinks but on 10"
of_layers = partial(CacheFormat, apart=True)
on_cpu = partial(of_layers, devices=("cpu",), needs="AVX-512 or AMX", multiple=32)
turboquant = partial(of_layers, devices=("cuda",), exact_ends=2)

ENGINE = ServingEngine(
    name="vllm",
    version="0.32",
    formats=(
        of_layers("fp8_e4m3", needs=ADA),
        of_layers("fp8_e5m2", devices=("cuda",), needs=ADA),
        on_cpu("fp8_e4m3-cpu", option="fp8_e4m3"),
        on_cpu("fp8_e5m2-cpu", option="fp8_e5m2"),
        of_layers("int8_per_token_head"),
        of_layers("fp8_per_token_head", needs=ADA),
        of_layers("int4_per_token_head"),
        turboquant("turboquant_k8v4"),
        turboquant("turboquant_4bit_nc"),
        turboquant("turboquant_k3v4_nc"),
        turboquant("turboquant_3bit_nc"),
        of_layers("ultraquant_4bit", devices=("rocm",), exact_ends=2, needs="a model without attention sinks"),
        of_layers("nvfp4", devices=("cuda",), needs=FLASHINFER, multiple=16),
        *own_formats(
            "vLLM pages",
            " && KVLAB_PAGES={file} python -m vllm.entrypoints.openai.api_server --model {{model}}",
            devices=("cpu",),
            needs="kvlab beside vLLM, whose plugin it brings (docs/vllm.md)",
            unmeasured="--sink and --recent of kvlab calibrate, with which answers lose less (docs/vllm.md)",
        ),
    ),
    line="vllm serve {model} --kv-cache-dtype {option}{skipped}",
    skipped=" --kv-cache-dtype-skip-layers {layers}",
    as_read="in_forward",
    held="vLLM's own kernels in Triton's interpreter and on a CPU, byte by byte (docs/codecs.md); nvfp4 its emulation",
    unmeasured="FlashAttention 3 also rounds queries to fp8; checkpoints that bring scales of their own",
    sources=(
        "vllm 0.32: config/cache.py, v1/attention/backends (supported_kv_cache_dtypes), engine/arg_utils.py (layers at"
        " the ends of turboquant and ultraquant)",
        "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/",
    ),
    plain="auto",
)

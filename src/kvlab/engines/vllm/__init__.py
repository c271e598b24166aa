"""vLLM, in this process or split over several; its attention is its own choice."""

from __future__ import annotations

from kvlab.core.engines import AUTO, Capability, EngineInfo

ENGINE = EngineInfo(
    "kvlab.engines.vllm.engine:VLLMEngine",
    "vLLM",
    "vllm",
    attention="default",
    # found by running it: on a CPU it accepts many cache dtypes, and computes garbage with all but these; its `fp8` is
    # e4m3 under another name. Head sizes: vllm/v1/attention/backends/cpu_attn.py, 0.32.0
    able=Capability(
        attentions=("default",),
        dtypes=("bfloat16", "float32"),
        protocols=("in_forward", "snapshot"),
        cache_dtypes=(AUTO, "fp8_e4m3", "fp8_e5m2"),
        cpu_head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        one_window=("Qwen2ForCausalLM", "Qwen3ForCausalLM"),  # an assertion of its own
        splits=True,
    ),
    modules=("kvlab.engines.vllm.follower",),
    paged=True,
)

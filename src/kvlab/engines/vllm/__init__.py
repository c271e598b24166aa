"""vLLM, in this process or split over several; its attention is its own choice."""

from __future__ import annotations

from kvlab.core.engines import EngineInfo

ENGINE = EngineInfo(
    "kvlab.engines.vllm.engine:VLLMEngine",
    "vLLM",
    "vllm",
    attention="default",
    modules=("kvlab.engines.vllm.follower",),
    paged=True,
)

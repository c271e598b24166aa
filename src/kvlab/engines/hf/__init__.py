"""transformers."""

from __future__ import annotations

from kvlab.core.engines import Capability, EngineInfo

ENGINE = EngineInfo(
    "kvlab.engines.hf.engine:HFEngine",
    "transformers",
    "transformers",
    attention="sdpa",
    able=Capability(
        attentions=("eager", "sdpa"),
        dtypes=("bfloat16", "float32"),
        protocols=("in_forward", "snapshot"),
    ),
)

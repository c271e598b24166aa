"""Names of the engines, and the one place that loads them (lazily: an engine costs seconds to import)."""

from __future__ import annotations

from importlib import import_module

import torch

from kvlab.engines.base import Engine
from kvlab.engines.capability import check
from kvlab.errors import UnknownName
from kvlab.model import ModelInfo

ENGINES = {"hf": "kvlab.engines.hf:HFEngine", "vllm": "kvlab.engines.vllm:VLLMEngine"}

# What cells run with. Eager attention is what the published study measured on HF.
DEFAULT_ATTENTION = {"hf": "eager", "vllm": "default"}


def start(name: str, info: ModelInfo, dtype: str, attention: str | None = None, *, max_tokens: int) -> Engine:
    """Load an engine, after the capability table has let it pass.

    Parameters
    ----------
    max_tokens : int
        Longest window that will be scored.
    """
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    attention = attention or DEFAULT_ATTENTION[name]
    check(name, dtype, attention, info, on_cpu=not torch.cuda.is_available())
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(import_module(module), attribute)(info, dtype, attention, max_tokens)

"""Names of the engines, and the one place that loads them (lazily: an engine costs seconds to import)."""

from __future__ import annotations

from importlib import import_module

import torch

from kvlab.core.engines import AUTO
from kvlab.core.errors import UnknownName
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import ENGINES
from kvlab.engines.base import Engine
from kvlab.engines.capability import check


def start(
    name: str,
    info: ModelInfo,
    dtype: str,
    attention: str | None = None,
    *,
    max_tokens: int,
    cache_dtype: str = AUTO,
) -> Engine:
    """Load an engine, after the capability table has let it pass.

    Parameters
    ----------
    max_tokens : int
        Longest window that will be scored.
    cache_dtype : str
        What the engine's own cache stores K and V in; ``auto`` is the model's dtype.
    """
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    attention = attention or ENGINES[name].attention
    check(name, dtype, attention, info, not torch.cuda.is_available(), cache_dtype)
    module, _, attribute = ENGINES[name].engine.partition(":")
    stored = {} if cache_dtype == AUTO else {"cache_dtype": cache_dtype}  # not told to engines that have no choice
    return getattr(import_module(module), attribute)(info, dtype, attention, max_tokens, **stored)

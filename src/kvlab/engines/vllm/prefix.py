"""A context's K and V put into vLLM's paged cache, so that vLLM computes the tokens after it alone.

vLLM's public interface for K and V from outside is its KV connector: asked of a prompt how many tokens it can bring,
and told into which blocks. `PrefixConnector` brings what waits, through the function by which vLLM's own attention
writes its cache, so whatever layout a backend has is the backend's own affair. It works inside the process of the
engine (`process`), where scheduler and model share memory, and it writes as soon as the blocks are known: the
half beside the model is one for all engines of a process, which then all write into the cache of the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from kvlab.core.errors import CodecNotActive, Fault
from kvlab.engines.base import ContextCache, context_of

CONFIG = KVTransferConfig(kv_connector="PrefixConnector", kv_connector_module_path=__name__, kv_role="kv_consumer")


@dataclass
class Filling:
    """One context on its way into the cache of one engine.

    Attributes
    ----------
    cache : ContextCache
        K as the paged cache holds it, after its rotary embedding.
    layers : sequence of Attention
        The engine's own, in order of depth.
    written : int
        Layers whose K and V were written.
    """

    cache: ContextCache
    layers: Sequence[Any]
    written: int = 0

    def write(self, blocks: Sequence[int], block_size: int) -> None:
        """Write all layers' K and V into a prompt's blocks, as their attention does."""
        for number, layer in enumerate(self.layers):
            k, v = (self.cache[number, part].transpose(0, 1).contiguous() for part in ("k", "v"))
            slots = slots_of(blocks, len(k), block_size).to(layer.kv_cache.device)
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
            self.written += 1


_waiting: list[Filling] = []  # at most one: prompts go through one by one


@contextmanager
def filled(cache: ContextCache, layers: Sequence[Any]) -> Iterator[None]:
    """Inside the block the next prompt of the engine that has these layers starts from `cache`.

    Raises
    ------
    Fault
        Another context is on its way.
    CodecNotActive
        vLLM computed the context itself.
    """
    if _waiting:
        raise Fault("a context is on its way into vLLM's cache already")
    filling = Filling(cache, layers)
    _waiting.append(filling)
    try:
        yield
    finally:
        _waiting.clear()
    if filling.written != len(layers):
        raise CodecNotActive(
            f"vLLM took K and V of {filling.written} of {len(layers)} layers from outside; nothing was measured"
        )


class PrefixConnector(KVConnectorBase_V1):
    """Brings the waiting context; see the module."""

    # Beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens of the waiting context; they are there before the step begins."""
        return (context_of(_waiting[0].cache) - num_computed_tokens if _waiting else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The prompt has got its blocks: they are filled at once."""
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            _waiting[0].write(ids, self._vllm_config.cache_config.block_size)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The half beside the model has nothing to do."""
        return KVConnectorMetadata()

    # Beside the model

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Nothing is read or written on this side."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is on its way."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is on its way."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is kept."""

    def wait_for_save(self) -> None:
        """Nothing is kept."""


def slots_of(blocks: Sequence[int], tokens: int, block_size: int) -> torch.Tensor:
    """Places of a sequence's first tokens in the paged cache, int64 [tokens]."""
    positions = torch.arange(tokens)
    return torch.tensor(blocks, dtype=torch.int64)[positions // block_size] * block_size + positions % block_size

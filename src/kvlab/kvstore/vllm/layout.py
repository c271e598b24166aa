"""All layers of vLLM's paged cache, read and written in chunks of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.base.errors import CapabilityError
from kvlab.engines.vllm_pages import found_out, refuse_other
from kvlab.kvstore.paging.geometry import Geometry, named


class PagedRows:
    """All layers of vLLM's paged cache, in chunks of a snapshot.

    Parameters
    ----------
    caches : sequence of Tensor
        Of each layer in order, [blocks, kv_heads, block_tokens, 2 * head_dim].
    layers : sequence of Attention
        The layers that they belong to.
    geometry : Geometry
        Of the chunks.

    Raises
    ------
    CapabilityError
        When a cache has another shape, dtype or device, or its backend does more than put values in places.
    """

    def __init__(self, caches: Sequence[Tensor], layers: Sequence[Any], geometry: Geometry):
        self.caches, self.geometry = tuple(caches), geometry
        self.block_tokens = self.caches[0].shape[2]
        for cache in self.caches:
            self._refuse_strange(cache)
        self._places = found_out(layers[0], self.caches[0])
        for layer, cache in zip(layers, self.caches, strict=True):
            refuse_other(layer, cache, self._places)

    def read(self, block_ids: Sequence[int], start: int) -> Tensor:
        """The chunk whose first token is the sequence's token `start`: a payload of the geometry.

        Parameters
        ----------
        block_ids : sequence of int
            Of the sequence, from its first token on.
        start : int
            A position.
        """
        blocks, offsets = self._of(block_ids, start, start + self.geometry.chunk_tokens)
        rows = [torch.stack(self._places.read(cache, blocks, offsets)) for cache in self.caches]
        return torch.stack(rows).contiguous()

    def layer(self, layer: int, block_ids: Sequence[int], tokens: int) -> Tensor:
        """K and V of one layer of a sequence's first tokens, [2, kv_heads, tokens, head_dim]."""
        blocks, offsets = self._of(block_ids, 0, tokens)
        return torch.stack(self._places.read(self.caches[layer], blocks, offsets))

    def write(self, block_ids: Sequence[int], start: int, chunk: Tensor, begin: int = 0) -> None:
        """The inverse of `read`, without the tokens before position `begin`."""
        self.geometry.check_chunk(chunk)
        skipped = min(max(begin - start, 0), self.geometry.chunk_tokens)
        blocks, offsets = self._of(block_ids, start + skipped, start + self.geometry.chunk_tokens)
        for cache, (k, v) in zip(self.caches, chunk[:, :, :, skipped:].unbind(), strict=True):
            self._places.write(cache, blocks, offsets, k, v)

    def _of(self, block_ids: Sequence[int], start: int, end: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, end)
        blocks = torch.tensor(block_ids, dtype=torch.int64)[positions // self.block_tokens]
        return blocks, positions % self.block_tokens

    def _refuse_strange(self, cache: Tensor) -> None:
        geometry = self.geometry
        due = (geometry.kv_heads, self.block_tokens, 2 * geometry.head_dim)
        plain = cache.dim() == 4 and cache.device.type == "cpu" and cache.stride()[1:] == (due[1] * due[2], due[2], 1)
        if not plain or tuple(cache.shape[1:]) != due or cache.dtype != geometry.torch_dtype:
            raise CapabilityError(
                f"snapshots cannot be used here: a layer's cache is {list(cache.shape)} {named(cache.dtype)} on"
                f" {cache.device}, needed is [blocks, {', '.join(map(str, due))}] {geometry.dtype} on the CPU, in order"
            )

"""Where K and V of a token lie inside a block of vLLM's paged cache.

An attention backend writes its cache as its kernel likes to read it. On the CPU that is a block of K turned on its
side, and pairs of tokens interleaved where the processor multiplies matrices (AMX); only V lies row by row. vLLM has a
function that writes K and V into a block and none that reads them back. What it does is therefore found out: numbers
are written through it into blocks of our own, and where they arrive is where K and V will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.base.errors import CapabilityError
from kvlab.kvstore.paging.geometry import Geometry, named, same_bits

BASE = 128  # of the digits in which a place is numbered; whole numbers below it are exact in every dtype


@dataclass(frozen=True)
class Places:
    """Where each value of a block lies.

    Parameters
    ----------
    k, v : Tensor
        int64 [block_tokens, head_dim]: place in the ``2 * block_tokens * head_dim`` values of a block's KV head.
    """

    k: Tensor
    v: Tensor

    def read(self, cache: Tensor, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of tokens, [kv_heads, n, head_dim] each.

        Parameters
        ----------
        cache : Tensor
            [blocks, kv_heads, block_tokens, 2 * head_dim].
        blocks, offsets : Tensor
            int64 [n]: each token's block and its place in it.
        """
        flat, at = cache.flatten(2), blocks[:, None]
        return tuple(flat[at, :, places[offsets]].permute(2, 0, 1) for places in (self.k, self.v))

    def write(self, cache: Tensor, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """The inverse of `read`; other tokens of the same blocks stay as they are."""
        flat, at = cache.view(*cache.shape[:2], -1), blocks[:, None]
        for places, rows in ((self.k, k), (self.v, v)):
            flat[at, :, places[offsets]] = rows.permute(1, 2, 0)


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


def found_out(layer: Any, cache: Tensor) -> Places:
    """Where the backend of a layer puts K and V in a block.

    Parameters
    ----------
    layer : Attention
        vLLM's.
    cache : Tensor
        Its cache, which is not touched.

    Raises
    ------
    CapabilityError
        When not every value arrives in one place.
    """
    heads, tokens, width = cache.shape[1:]
    size = tokens * width
    numbers = torch.arange(1, size + 1)
    arrived, weight = torch.zeros(heads, size, dtype=torch.int64), 1
    while weight <= size:  # digit by digit: the dtype need not hold a number, and 0 is what was never written
        digits = (numbers // weight % BASE).view(2, tokens, 1, width // 2).expand(2, tokens, heads, width // 2)
        k, v = digits.to(cache.dtype)
        arrived += weight * _written(layer, cache, k, v)[1].flatten(1).to(torch.int64)
        weight *= BASE
    order = arrived[0].argsort()
    if not torch.equal(arrived[0][order], numbers) or not torch.equal(arrived, arrived[:1].expand_as(arrived)):
        raise CapabilityError(
            f"snapshots cannot be used here: {type(layer.impl).__name__} does not put each value of K and V into one"
            " place of the cache, so they could not be read back"
        )
    return Places(*order.view(2, tokens, width // 2))


def refuse_other(layer: Any, cache: Tensor, places: Places) -> None:
    """`CapabilityError` unless what a layer's backend writes is read back, bit for bit, from these places."""
    heads, tokens, width = cache.shape[1:]
    source = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tokens, heads, width // 2, generator=source).to(cache.dtype)
    blocks = _written(layer, cache, k, v)
    one = torch.ones(tokens, dtype=torch.int64)
    for found, given in zip(places.read(blocks, one, torch.arange(tokens)), (k, v), strict=True):
        if not same_bits(found, given.transpose(0, 1)):
            raise CapabilityError("snapshots cannot be used here: the layers keep K and V in different places")


def _written(layer: Any, cache: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two blocks like a layer's own, the second of which its backend has filled; K and V [tokens, heads, head_dim]."""
    blocks = torch.zeros(2, *cache.shape[1:], dtype=cache.dtype)
    tokens = cache.shape[2]
    layer.impl.do_kv_cache_update(layer, k.contiguous(), v.contiguous(), blocks, torch.arange(tokens, 2 * tokens))
    return blocks

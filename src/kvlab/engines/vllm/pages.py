"""Where K and V of a token lie inside a block of vLLM's paged cache.

An attention backend writes its cache as its kernel likes to read it. On the CPU that is a block of K turned on its
side, and pairs of tokens interleaved where the processor multiplies matrices (AMX); only V lies row by row. vLLM has a
function that writes K and V into a block and none that reads them back. What it does is therefore found out: numbers
are written through it into blocks of our own, and where they arrive is where K and V will be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.core.errors import CapabilityError

BASE = 128  # of the digits in which a place is numbered; whole numbers below it are exact in every dtype


@dataclass(frozen=True)
class CachePlaces:
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


def found_out(layer: Any, cache: Tensor) -> CachePlaces:
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
            f"K and V cannot be read back here: {type(layer.impl).__name__} does not put each value of K and V into one"
            " place of the cache, so they could not be read back",
            code="capability.cache-places",
        )
    return CachePlaces(*order.view(2, tokens, width // 2))


def refuse_other(layer: Any, cache: Tensor, places: CachePlaces) -> None:
    """`CapabilityError` unless what a layer's backend writes is read back, bit for bit, from these places."""
    heads, tokens, width = cache.shape[1:]
    source = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tokens, heads, width // 2, generator=source).to(cache.dtype)
    blocks = _written(layer, cache, k, v)
    one = torch.ones(tokens, dtype=torch.int64)
    for found, given in zip(places.read(blocks, one, torch.arange(tokens)), (k, v), strict=True):
        if not _same_bits(found, given.transpose(0, 1)):
            raise CapabilityError(
                "K and V cannot be read back here: the layers keep K and V in different places",
                code="capability.layers-differ",
            )


def _written(layer: Any, cache: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two blocks like a layer's own, the second of which its backend has filled; K and V [tokens, heads, head_dim]."""
    blocks = torch.zeros(2, *cache.shape[1:], dtype=cache.dtype)
    tokens = cache.shape[2]
    layer.impl.do_kv_cache_update(layer, k.contiguous(), v.contiguous(), blocks, torch.arange(tokens, 2 * tokens))
    return blocks


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))

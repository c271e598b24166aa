"""Pagers with known contents, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry, same_bits
from kvlab.kvstore.paging.ledger import Ledger
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import build


def random_bits(geometry: Geometry, tokens: int, seed: int = 0) -> Tensor:
    """[layers, 2, kv_heads, tokens, head_dim] of any bits whatever: NaN, infinities and -0 are among them."""
    shape = (geometry.layers, 2, geometry.kv_heads, tokens, geometry.head_dim, geometry.torch_dtype.itemsize)
    source = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)
    return raw.view(geometry.torch_dtype).squeeze(-1)


def numbers(geometry: Geometry, tokens: int, seed: int = 0) -> Tensor:
    """The same shape, normally distributed."""
    shape = (geometry.layers, 2, geometry.kv_heads, tokens, geometry.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(geometry.torch_dtype)


def write(pager: Pager, rows: Tensor, layers: Sequence[int] | None = None) -> None:
    """What each layer has not got yet of `rows`, which begin at position 0."""
    for layer in range(pager.geometry.layers) if layers is None else layers:
        start, end = pager._written[layer], pager.length
        if start < end:
            pager.write(layer, start, *rows[layer, :, :, start:end])


def append(pager: Pager, rows: Tensor, n: int) -> None:
    """The next n tokens of `rows`, in all layers."""
    pager.alloc_span(pager.length, n)
    write(pager, rows)


def filled(
    rows: Tensor,
    geometry: Geometry,
    config: PagerConfig,
    policy: str = "lru",
    step: int = 1,
    block_order: Sequence[int] | None = None,
) -> Pager:
    """A pager that holds all of `rows`, which came at most `step` tokens at a time."""
    pager = Pager(geometry, config, build(policy, geometry), block_order=block_order)
    while pager.length < rows.shape[3]:
        append(pager, rows, min(step, pager.room, rows.shape[3] - pager.length))
    return pager


def saved(pager: Pager) -> tuple[list[Tensor], Ledger, int]:
    """What a snapshot takes: payloads, ledger and length of the sealed chunks."""
    payloads = [pager.payload(chunk) for chunk in range(pager.sealed)]
    return payloads, pager.ledger(pager.sealed), pager.sealed * pager.geometry.chunk_tokens


def holds(pager: Pager, rows: Tensor) -> bool:
    """Whether every sealed chunk has the bits of `rows`, and every layer gathers just its resident ones."""
    return all(
        same_bits(pager.payload(chunk), chunk_of(rows, chunk, pager.geometry)) for chunk in range(pager.sealed)
    ) and all(gathers(pager, rows, layer) for layer in range(pager.geometry.layers))


def gathers(pager: Pager, rows: Tensor, layer: int) -> bool:
    """Whether a layer gathers what it has written of the resident chunks, in logical order."""
    size, end = pager.geometry.chunk_tokens, pager._written[layer]
    due = [p for chunk in pager.resident for p in range(chunk * size, min(end, (chunk + 1) * size))]
    found = pager.gather(layer)
    k, v = rows[layer][:, :, due]
    return found.positions.tolist() == due and same_bits(found.k, k) and same_bits(found.v, v)


def chunk_of(rows: Tensor, chunk: int, geometry: Geometry) -> Tensor:
    """The payload of a chunk of `rows`."""
    size = geometry.chunk_tokens
    return rows[:, :, :, chunk * size : (chunk + 1) * size].contiguous()


def state(pager: Pager) -> tuple:
    """All that a refused call must leave as it was."""
    return (
        pager.ledger(),
        pager.resident,
        pager.epoch,
        pager.stats,
        pager.length,
        pager.pins,
        tuple(pager._written),
        tuple(pager.chunks.pool.free),
        tuple(chunk.block for chunk in pager.chunks.items),
    )

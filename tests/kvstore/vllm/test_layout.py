"""K and V are found wherever a backend puts them, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvlab.core.errors import CapabilityError
from kvlab.engines.vllm.pages import found_out
from kvlab.kvstore.paging.geometry import Geometry, same_bits
from kvlab.kvstore.vllm.worker import PagedRows
from refusals import refused

HEADS, BLOCK, DIM, BLOCKS = 2, 32, 32, 6


def row_by_row(k, v, block):
    """K in the first half of a head's values, V in the second."""
    block[:] = torch.cat([k, v], 1).flatten(1).view_as(block)


def turned(k, v, block):
    """K on its side, as the CPU's kernels have it."""
    block[:] = torch.cat([k.transpose(1, 2).flatten(1), v.flatten(1)], 1).view_as(block)


def in_pairs(k, v, block):
    """Pairs of values of K side by side, pairs of tokens of V: what AMX multiplies."""
    k = k.unflatten(2, (-1, 2)).permute(0, 2, 1, 3)
    v = v.unflatten(1, (-1, 2)).permute(0, 1, 3, 2)
    block[:] = torch.cat([k.flatten(1), v.flatten(1)], 1).view_as(block)


def interleaved(k, v, block):
    """K and V of a token beside one another."""
    block[:] = torch.stack([k, v], 2).flatten(1).view_as(block)


def only_k(k, v, block):
    block[:] = torch.cat([k, torch.zeros_like(v)], 1).flatten(1).view_as(block)


def summed(k, v, block):
    row_by_row(k.cumsum(1), v, block)


def other_heads(k, v, block):
    row_by_row(k, v, block)
    block[1] = block[1].flip(0)


def layer(pack):
    """As `do_kv_cache_update` of vLLM's backends: K and V [tokens, heads, dim], slots of whole blocks."""

    def update(_layer, key, value, cache, slots):
        for block in (slots // BLOCK).unique().tolist():
            at = slots // BLOCK == block
            k, v = key[at].transpose(0, 1), value[at].transpose(0, 1)
            pack(k, v, cache[block])

    return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))


def geometry(dtype: str = "float32", chunk_tokens: int = 16, layers: int = 1) -> Geometry:
    return Geometry(layers, HEADS, DIM, dtype, chunk_tokens)


def caches(layers: int = 1, dtype=torch.float32):
    return [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=dtype) for _ in range(layers)]


def bits(geometry: Geometry, seed: int):
    """Any bits, NaN among them."""
    source = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (geometry.chunk_bytes,), generator=source, dtype=torch.uint8)
    return raw.view(geometry.torch_dtype).view(geometry.chunk_shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pack", [row_by_row, turned, in_pairs, interleaved])
def test_what_a_backend_writes_is_read_from_where_it_lies(pack, dtype):
    shape, store = geometry(dtype, BLOCK), caches(dtype=getattr(torch, dtype))
    rows = PagedRows(store, [layer(pack)], shape)
    given = bits(shape, 1)
    pack(*given[0], store[0][4])
    assert same_bits(rows.read([2, 4], BLOCK), given)
    rows.write([3], 0, given)
    assert same_bits(store[0][3], store[0][4])


@pytest.mark.parametrize("chunk_tokens", [1, 8, 24, 32, 48, 80])
def test_chunks_of_any_size_pass_through_blocks_in_any_order(chunk_tokens):
    """Every token in its place and no other touched, wherever chunks and blocks begin."""
    shape, store = geometry(chunk_tokens=chunk_tokens, layers=3), caches(3)
    rows = PagedRows(store, [layer(turned)] * 3, shape)
    block_ids = [4, 0, 5, 2]
    count = len(block_ids) * BLOCK // chunk_tokens
    given = [bits(shape, number) for number in range(count)]
    for number, chunk in enumerate(given):
        rows.write(block_ids, number * chunk_tokens, chunk)
    for number, chunk in enumerate(given):
        assert same_bits(rows.read(block_ids, number * chunk_tokens), chunk)
    whole = torch.cat(given, dim=3)
    for number in range(3):
        assert same_bits(rows.layer(number, block_ids, whole.shape[3]), whole[number].contiguous())
    assert all(not cache[block].any() for cache in store for block in (1, 3))


def test_tokens_in_front_of_the_beginning_are_left_alone():
    shape, (store,) = geometry(), caches()
    rows = PagedRows([store], [layer(turned)], shape)
    first, second = bits(shape, 1), bits(shape, 2)
    rows.write([1], 16, first)
    rows.write([1], 16, second, begin=21)
    found = rows.read([1], 16)
    assert same_bits(found[..., :5, :], first[..., :5, :]) and same_bits(found[..., 5:, :], second[..., 5:, :])
    before = store.clone()
    rows.write([1], 16, first, begin=40)
    assert same_bits(store, before)


@pytest.mark.parametrize("pack", [only_k, summed, other_heads])
def test_a_backend_that_does_more_than_put_values_in_places_is_refused(pack):
    with refused(CapabilityError, "capability.cache-places"):
        found_out(layer(pack), caches()[0])


def test_layers_that_differ_are_refused():
    with refused(CapabilityError, "capability.layers-differ"):
        PagedRows(caches(2), [layer(turned), layer(row_by_row)], geometry(layers=2))


@pytest.mark.parametrize(
    "store",
    [
        torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.uint8),
        torch.zeros(BLOCKS, HEADS, BLOCK, DIM),
        torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2),
        torch.zeros(BLOCKS, BLOCK, 2 * DIM),
        torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, device="meta"),
    ],
    ids=["bytes", "K alone", "strided", "no heads", "elsewhere"],
)
def test_a_cache_of_another_kind_is_refused(store):
    with refused(CapabilityError, "capability.cache-layout", list(store.shape)):
        PagedRows([store], [layer(turned)], geometry())


@pytest.mark.engine
@pytest.mark.parametrize(("isa", "block"), [("vec", 32), ("vec", 64), ("vec16", 16), ("amx", 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_of_vllm_itself(isa, block, dtype):
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    import kvlab.engines.vllm.process  # noqa: F401 (sets what must be set before vLLM is imported)

    current_platform.import_kernels()
    if isa == "amx" and not (dtype == "bfloat16" and torch.cpu._is_amx_tile_supported()):
        pytest.skip("this processor or this dtype has no AMX")

    def update(_layer, key, value, cache, slots):
        k, v = cache.view(*cache.shape[:2], -1, DIM).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(key, value, k, v, slots, isa)

    kernel = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))
    store, count = torch.zeros(3, HEADS, block, 2 * DIM, dtype=getattr(torch, dtype)), block
    rows = PagedRows([store], [kernel], geometry(dtype, chunk_tokens=1))
    k, v = torch.randn(2, count, HEADS, DIM).to(store.dtype)
    slots = torch.randperm(3 * block)[:count]  # each token where chance puts it
    update(None, k, v, store, slots)
    for token, slot in enumerate(slots.tolist()):
        found = rows.read([0, 1, 2], slot)
        assert same_bits(found, torch.stack([k[token], v[token]])[None, :, :, None])
    theirs = store.clone()
    store.zero_()
    for token, slot in enumerate(slots.tolist()):
        rows.write([0, 1, 2], slot, torch.stack([k[token], v[token]])[None, :, :, None])
    assert same_bits(store, theirs)

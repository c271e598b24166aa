"""Rows of `kvlab_mechanisms.memory`: pages, a host tier, compaction, selection, the stream between processes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvlab.attention import selection
from kvlab.attention.compaction import compact, new_places
from kvlab.codecs.base import Site
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import frame_bytes
from kvlab_mechanisms.memory.host_tier import HostTier
from kvlab_mechanisms.memory.page_pool import PagePool
from kvlab_mechanisms.memory.wire import StreamHead, pack, unpack
from kvlab_mechanisms.micro.row import BenchRow, hold

PAGE = 2 * 8 * 16 * 64 * 4  # bytes of a page of K and V: 8 heads, 16 tokens of 64 numbers, float32


def rows() -> Iterator[BenchRow]:
    """All of them."""
    yield from pages()
    yield from tier()
    yield from gaps()
    yield from choices()
    yield from wire()


def pages() -> Iterator[BenchRow]:
    """Taking and giving back a page; closing holes."""
    pool = PagePool(256, 16, [PAGE // 16])

    def round_trip() -> None:
        pool.extend("a", 16)
        pool.release("a")

    def check() -> None:
        round_trip()
        hold(pool.used == 0)

    yield BenchRow(
        "r10",
        "1 page of 64 KiB",
        check,
        round_trip,
        *block_pool(),
        "loses: ours grows a sequence's table and copies shared pages on writing; the rival hands out a number",
    )
    yield from compactions()


def compactions() -> Iterator[BenchRow]:
    """A pool that is compact, and one that is not."""
    compact_pool, churned = live_pages(60), live_pages(90)
    sources, targets = torch.arange(60, 90), torch.arange(0, 60, 2)

    def none_moved() -> None:
        hold(compact_pool.defragment() == [] and compact_pool.external == 0)

    def moves() -> None:
        pool = live_pages(90)
        hold(len(churn(pool)) == 30 and pool.external == 0)

    def copied_back() -> None:
        compact_pool.data[:60] = compact_pool.data[:60].clone()

    def moved() -> None:
        churned.data[targets] = churned.data[sources]

    note = "the original copies every live page out and back, as the rival here does"
    yield BenchRow(
        "r11", "60 live pages of 64 KiB, compact", none_moved, compact_pool.defragment, copied_back, "torch", note
    )
    yield BenchRow(
        "r11-30 moves", "90 live pages of 64 KiB, 30 of them moved", moves, lambda: churn(churned), moved,
        "torch, the same bytes by an index", "ours with giving back and taking 30 pages, which makes the holes",
    )  # fmt: skip
    yield BenchRow("r12", "after defragment()", none_moved, value=lambda: compact_pool.external)


def live_pages(count: int) -> PagePool:
    """A pool of 256 pages, so many of them held by a sequence each."""
    pool = PagePool(256, 16, [PAGE // 16])
    for number in range(count):
        pool.extend(number, 16)
    return pool


def churn(pool: PagePool) -> list[tuple[int, int]]:
    """Give 30 of the lower pages back, close the holes, and take 30 new ones; returns the moves."""
    low = [name for name, table in pool.tables.items() if table.pages[0] < 60][::2]
    for name in low:
        pool.release(name)
    moves = pool.defragment()
    for _ in low:
        pool.extend(object(), 16)
    return moves


def block_pool() -> tuple:
    """vLLM's pool of blocks: one taken and given back."""
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError:
        return None, "vLLM is not installed"
    pool = BlockPool(256, False, 16)

    def round_trip() -> None:
        pool.free_blocks(pool.get_new_blocks(1))

    return round_trip, "vLLM BlockPool"


def tier() -> Iterator[BenchRow]:
    """Out to host memory and back."""
    page = torch.randn(512, 128)
    tier, warm = HostTier(1 << 24), torch.empty_like(page)
    tier.offload("a", page)

    def check() -> None:
        hold(torch.equal(tier.fetch("a"), page))

    copy = (lambda: warm.copy_(page)), "torch copy_ into a warm buffer"
    yield BenchRow(
        "r15",
        "256 KiB",
        check,
        lambda: tier.offload("a", page),
        *copy,
        "loses: a book of what is held and of traffic; the bytes are the same",
    )
    yield BenchRow("r16", "256 KiB", check, lambda: tier.fetch("a"), page.clone, "torch clone", "as r15")


def gaps() -> Iterator[BenchRow]:
    """What is left of K and V, and where it stood."""
    torch.manual_seed(0)
    k, v = torch.randn(8, 512, 64), torch.randn(8, 512, 64)
    keep = torch.rand(512) < 0.5
    index = keep.nonzero().flatten()

    def rival() -> None:
        k.index_select(1, index), v.index_select(1, index)

    def check() -> None:
        found = compact(k, v, keep)
        hold(torch.equal(found.k, k[:, keep]) and torch.equal(found.v, v[:, keep]))

    shape = "K and V of 8 heads, 512 tokens of 64, half of them kept"
    yield BenchRow(
        "r22",
        shape,
        check,
        lambda: compact(k, v, keep),
        rival,
        "torch index_select",
        "loses: ours checks that positions rise and exist, and says where each token stood",
    )

    def numpy_map() -> np.ndarray:
        places = np.full(512, -1)
        places[index.numpy()] = np.arange(len(index))
        return places

    def same() -> None:
        hold(new_places(512, index).tolist() == numpy_map().tolist())

    yield BenchRow(
        "r23", "512 tokens, half of them kept", same, lambda: new_places(512, index), numpy_map, "numpy",
        "loses: three small operations of torch, whose calls take longer than numpy's",
    )  # fmt: skip


def choices() -> Iterator[BenchRow]:
    """Which tokens stay."""
    torch.manual_seed(0)
    x = torch.randn(1024, 128)

    def ours() -> torch.Tensor:
        return selection.select(selection.large_embeddings(x), 256, recent=64)

    def rival() -> np.ndarray:
        norms = np.linalg.norm(x.numpy(), axis=1)[:960]
        return np.sort(np.argpartition(norms, 960 - 192)[960 - 192 :])

    def check() -> None:
        kept = ours().tolist()
        hold(kept[-64:] == list(range(960, 1024)) and kept[:-64] == rival().tolist())

    yield BenchRow(
        "r28",
        "1,024 tokens of 128, 256 stay",
        check,
        ours,
        rival,
        "numpy argpartition",
        "ours stable, the latest kept apart",
    )

    ids = torch.arange(1024)

    def tail() -> None:
        wanted = selection.select(selection.recency(1024), 256)
        hold(torch.equal(selection.latest(1024, 256), wanted) and torch.equal(wanted, ids[-256:]))

    yield BenchRow(
        "r29",
        "1,024 tokens, 256 stay",
        tail,
        lambda: selection.latest(1024, 256),
        lambda: ids[-256:],
        "torch slice",
        "loses: ours checks the budget and makes the positions, which the rival has",
    )


def wire() -> Iterator[BenchRow]:
    """The stream between processes, of one layer and of a whole cache."""
    yield from exact(8, 128, 64, 1, "r39", "r40", "r41", "one layer, K and V [8, 128, 64] float32")
    yield from exact(3, 4096, 64, 30, "r39-4096", "r40-4096", "r41-4096", "30 layers, K and V [3, 4096, 64] float32")
    for bits in (4, 3, 2):
        yield from coded(bits)


def coded(bits: int) -> Iterator[BenchRow]:
    """A coded cache written and read: what a hand-over of fewer bits takes, the coding left out."""
    torch.manual_seed(0)
    codec, one = build(HadamardStream(bits=bits)), {}
    for stream in ("k", "v"):
        frame = frame_bytes(codec.encode(torch.randn(3, 4096, 64), Site(0, 0, stream)))
        one[stream] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    head = StreamHead("0123", "hadamard", "uint8", 30, 3, 64, 4096)
    cache = {(layer, stream): payload.clone() for layer in range(head.layers) for stream, payload in one.items()}
    ids = (f"r39-{bits} bits", f"r40-{bits} bits", f"r41-{bits} bits")
    yield from both_ways(head, cache, *ids, f"30 layers, K and V [3, 4096, 64], hadamard at {bits} bits")


def exact(heads: int, tokens: int, dim: int, layers: int, packing: str, unpacking: str, size: str, shape: str):
    """Exact K and V written and read, beside safetensors."""
    torch.manual_seed(0)
    head = StreamHead("0123", "", "float32", layers, heads, dim, tokens)
    cache = {(layer, s): torch.randn(heads, tokens, dim) for layer in range(layers) for s in ("k", "v")}
    yield from both_ways(head, cache, packing, unpacking, size, shape)


def both_ways(head: StreamHead, cache: dict, packing: str, unpacking: str, size: str, shape: str) -> Iterator[BenchRow]:
    """Payloads written, read and weighed, beside safetensors."""
    data = pack(head, cache)
    save, load, stored = safetensors_of(cache)

    def check() -> None:
        found = unpack(data)
        hold(all(torch.equal(found[place], cache[place]) for place in cache))

    told = "ours with a digest of every payload; safetensors has none"
    yield BenchRow(packing, shape, check, lambda: pack(head, cache), save, "safetensors save", told)
    yield BenchRow(unpacking, shape, check, lambda: unpack(data), load, "safetensors load", told)
    yield BenchRow(size, shape, check, value=lambda: float(len(data)), note=f"safetensors {len(stored):,} bytes")


def safetensors_of(cache: dict):
    """Writing and reading by safetensors, and what was written."""
    from safetensors.torch import load, save

    named = {f"{layer}.{s}": x for (layer, s), x in cache.items()}
    stored = save(named)
    return (lambda: save(named)), (lambda: load(stored)), stored

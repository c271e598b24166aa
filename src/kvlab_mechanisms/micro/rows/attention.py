"""Rows of `kvlab.attention`: latents, block-sparse reading, chunk summaries, plans by layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kvlab.attention.block_sparse import allowed, blocks_of
from kvlab.attention.chunk_summary import attend_summaries, summaries_of
from kvlab.attention.layer_plan import by_length, saved
from kvlab.attention.patterns import BlockSparse, ChunkSummary, Full
from kvlab_mechanisms.attention.block_executors import gathered, masked
from kvlab_mechanisms.attention.latent import LatentCache, LatentWeights, attend_latent, attend_naive, ratio
from kvlab_mechanisms.micro.row import BenchRow, hold

HEADS, DIM, LATENT, LAYERS = 8, 64, 128, 24
CLOSE = 1e-4


def rows() -> Iterator[BenchRow]:
    """All of them."""
    yield from latents()
    yield from sparse()
    yield from summaries()
    yield from plans()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that are always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(a: Tensor, b: Tensor, what: str) -> None:
    """`Wrong` unless two results are close."""
    apart = float((a - b).abs().max() / b.abs().max())
    hold(apart < CLOSE, f"{what} is {apart:.1e} away")


def latents() -> Iterator[BenchRow]:
    """One token stored, and a step over many."""
    cache, plain, x = LatentCache(LATENT, capacity=8192), torch.zeros(1, 8192, LATENT), normal(1, 1, LATENT)

    def append() -> None:
        if cache.tokens == 8192:
            cache.reset()
        cache.append(x)

    def copied() -> None:
        plain[:, 7:8] = x

    def check() -> None:
        cache.reset()
        append()
        hold(torch.equal(cache.rows, x))

    note = "ours checks shape and capacity"
    yield BenchRow("r01", "one float32 vector of 128 into (8192, 128)", check, append, copied, "torch row copy", note)
    for name, tokens in (("r02", 16), ("r02-4096", 4096), ("r02-32768", 32768)):
        yield step(name, tokens)

    def bytes_of() -> float:
        full = 2 * HEADS * DIM * x.itemsize
        hold(ratio(HEADS, DIM, LATENT) == full / (LATENT * x.itemsize), "the ratio is not that of the bytes")
        return ratio(HEADS, DIM, LATENT)

    note = "K and V are both replaced, which the original's 4.0 forgets"
    yield BenchRow("r03", "8 heads of 64 by 128 numbers", lambda: hold(bytes_of() == 8), value=bytes_of, note=note)


def step(name: str, tokens: int) -> BenchRow:
    """A decoding step in absorbed form, beside dense attention over K and V that are there."""
    up = [normal(LATENT, HEADS * DIM, seed=seed) / LATENT**0.5 for seed in (1, 2)]
    weights = LatentWeights.absorb(*up, HEADS)
    q, c = normal(1, HEADS, 1, DIM, seed=3), normal(1, tokens, LATENT, seed=4)
    k, v = (c[:, None] @ one for one in (weights.up_k, weights.up_v))

    def rival() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    def check() -> None:
        found = attend_latent(q, c, weights)
        same(found, attend_naive(q, c, weights), "making every key and value")
        same(found, rival(), "dense attention")

    shape = f"{tokens:,} tokens, 8 heads of 64, latents of 128"
    told = "torch SDPA over K and V, which take 8 times the bytes"
    note = (
        "loses while the keys are in the caches: it multiplies more, to read an eighth; the rival keeps 8 times as much"
    )
    return BenchRow(name, shape, check, lambda: attend_latent(q, c, weights), rival, told, note)


def sparse() -> Iterator[BenchRow]:
    """A pass that leaves nothing out, and decoding steps that do."""
    every = BlockSparse(block=64, top_k=4, window=64, sinks=0)
    q, k, v = (normal(1, 4, n, 32, seed=seed) for seed, n in ((1, 16), (2, 256), (3, 256)))
    mask = allowed(q, k, every)

    def dense() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def check() -> None:
        hold(bool(mask.any(-1).all()) and int(mask.sum()) == 4 * (256 * 16 - 120), "something is left out")
        same(masked(q, k, v, every), dense(), "SDPA with the same mask")

    shape = "16 queries, 256 keys, 4 heads of 32, blocks of 64, 4 of 4 chosen"
    for name, note in (
        ("r04", "loses: nothing is left out, as in the original, and ours scores and chooses blocks all the same"),
        ("r05", "as r04"),
    ):
        yield BenchRow(name, shape, check, lambda: masked(q, k, v, every), dense, "torch SDPA with the mask", note)
    note = "of causal pairs nothing is left out; the original counts the causal triangle"
    yield BenchRow("r06", shape, check, value=lambda: 100 * (1 - float(mask.sum()) / (4 * (256 * 16 - 120))), note=note)
    for tokens in (4096, 32768, 131072):
        yield decoding(tokens)


def decoding(tokens: int) -> BenchRow:
    """One query that reads what it chooses, beside dense attention over everything."""
    few = BlockSparse(block=64, top_k=16, window=256, sinks=1)
    q, k, v = (normal(1, 4, n, 32, seed=seed) for seed, n in ((1, 1), (2, tokens), (3, tokens)))
    known = blocks_of(k, few.block)

    def ours() -> Tensor:
        return gathered(q, k, v, few, blocks=known)

    def check() -> None:
        same(ours(), masked(q, k, v, few), "the masked executor")

    shape = f"1 query, {tokens:,} keys, 4 heads of 32, blocks of 64, 16 chosen, window 256"
    told = "another result: it reads everything; ours reads what it chooses, with means that are kept"
    rival = lambda: functional.scaled_dot_product_attention(q, k, v)  # noqa: E731
    return BenchRow(f"r04-{tokens}", shape, check, ours, rival, "torch SDPA over all keys", told)


def summaries() -> Iterator[BenchRow]:
    """A chunk summed up, and queries that read four of them and their own tokens."""
    k, v = normal(1, 4, 64, 32, seed=1), normal(1, 4, 64, 32, seed=2)

    def check() -> None:
        found = summaries_of(k, v, 64)
        same(found.key[:, :, 0], k.mean(2), "the mean key")

    def means() -> None:
        k.mean(2), v.mean(2)

    note = "no rotary embedding, as in the original"
    yield BenchRow("r13", "64 tokens, 4 heads of 32", check, lambda: summaries_of(k, v, 64), means, "torch mean", note)
    yield pass_over()


def pass_over() -> BenchRow:
    """16 queries over four summaries and their own 16 tokens."""
    far = ChunkSummary(chunk=64, top_k=4, exact=0, sinks=0)
    q, k, v = (normal(1, 4, n, 32, seed=seed) for seed, n in ((3, 16), (4, 272), (5, 272)))
    known = summaries_of(k, v, 64)
    keys, values = (torch.cat([a, b[:, :, 256:]], 2) for a, b in ((known.key, k), (known.value, v)))
    bias = torch.zeros(16, 20).masked_fill(torch.ones(16, 20).triu(5).bool(), float("-inf"))
    bias[:, :4] = torch.log(torch.tensor(64.0))

    def rival() -> Tensor:
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias)

    def ours() -> Tensor:
        return attend_summaries(q, k, v, far, known=known)

    def check() -> None:
        same(ours(), rival(), "SDPA over summaries and own tokens")

    note = "ours scores all 272 keys and masks: it is the reference, and loses"
    return BenchRow("r14", "16 queries, 4 summaries", check, ours, rival, "torch SDPA over 20 keys", note)


def plans() -> Iterator[BenchRow]:
    """Which pattern a layer reads by, those of all layers, and what that spares."""
    types = ["full_attention"] * (LAYERS // 2) + ["sliding_attention"] * (LAYERS - LAYERS // 2)

    def check() -> None:
        plan = by_length(LAYERS, 2048)
        hold(plan[0] == Full() and len(plan) == LAYERS and sum(one == Full() for one in plan) == LAYERS // 2)

    told = "transformers' layer_types, a list"
    note = "loses: a plan that is kept is looked up by its settings, and a list is indexed"
    yield BenchRow(
        "r17", "layer 0 of 24, 1,024 tokens", check, lambda: by_length(LAYERS, 1024)[0], lambda: types[0], told, note
    )
    yield BenchRow("r18", "24 layers, 2,048 tokens", check, lambda: by_length(LAYERS, 2048), lambda: list(types), told)

    def spared() -> float:
        return 100 * saved(by_length(LAYERS, 2048), 2048)

    def formula() -> None:
        chosen = by_length(LAYERS, 2048)[-1]
        expected = 1 - chosen.flops(2048, 1, 1) / Full().flops(2048, 1, 1)
        hold(abs(spared() - 100 * expected / 2) < 1e-9, "half of the layers do not spare what one spares")

    note = "operations of attention by formula; the original's 25 is a constant, with no kernel after it"
    yield BenchRow("r19", "24 layers, 2,048 tokens", formula, value=spared, note=note)

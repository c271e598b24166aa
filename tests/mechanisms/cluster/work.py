"""What ranks do in tests; they import it by name."""

from __future__ import annotations

import torch

from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import build
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.recipe import Recipe
from kvlab_mechanisms.cluster import sequence_parallel, tensor_parallel
from kvlab_mechanisms.cluster.tensor_parallel import AttentionWeights, ColumnLinear, RowLinear, cut, share

CODECS = ("hadamard", "int", "kivi", "d4", "oscar")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, hidden: int = 24) -> AttentionWeights:
    sizes = ((heads * head_dim, hidden), (kv_heads * head_dim, hidden), (kv_heads * head_dim, hidden))
    return AttentionWeights(
        *(drawn(*size, seed=n) for n, size in enumerate(sizes)), drawn(hidden, heads * head_dim), head_dim
    )


def calibration(kv_heads: int, head_dim: int) -> StreamCalibration:
    chol = drawn(kv_heads, head_dim, head_dim, seed=5).tril() + 4 * torch.eye(head_dim)
    inverse = torch.linalg.solve_triangular(chol, torch.eye(head_dim).expand_as(chol), upper=False)
    return StreamCalibration(whiteners={0: Whitener(chol, inverse)}, outputs={0: chol @ chol.mT})


def codec_of(name: str, heads: slice | None, kv_heads: int, head_dim: int):
    """A codec for some heads, as a function of K or V."""
    recipe: Recipe = named_recipe(name, 4)
    fitted = calibration(kv_heads, head_dim)
    fitted = fitted if heads is None else cut(fitted, heads)

    def coded(x: torch.Tensor, site: Site) -> torch.Tensor:
        codec = build(getattr(recipe, site.stream), fitted)
        return codec.decode(codec.encode(x, site))

    return coded


def everything(ranks) -> dict:
    """All of tensor and sequence parallelism that two ranks show, in one start."""
    found = {"example": spec_example(ranks)}
    ranks.sent.clear()
    found |= {"collectives": collectives(ranks)}
    x = drawn(7, 24, seed=9)
    up, down = drawn(33, 24, seed=1), drawn(24, 33, seed=2)
    hidden = ColumnLinear(ranks, up)
    before = ranks.sent.copy()
    found["mlp"] = RowLinear(ranks, down)(torch.relu(hidden(x)))
    found["mlp sends"] = dict(ranks.sent - before)
    found["gathered"] = hidden(x, gather=True)
    whole = weights()
    own = share(whole.heads, whole.kv_heads, ranks.world, ranks.rank)
    found["attention"] = tensor_parallel.attention(ranks, x, whole)
    found["coded"] = {
        name: tensor_parallel.attention(ranks, x, whole, codec_of(name, own.kv, whole.kv_heads, whole.head_dim))
        for name in CODECS
    }
    return found | {"sequence": sequence(ranks)}


def collectives(ranks) -> dict:
    """Each of them with what it sent."""
    x = drawn(5, 3, seed=ranks.rank)
    gathered, reduced = ranks.all_gather(x, 1), ranks.all_reduce(x)
    return {"gathered": gathered, "reduced": reduced, "sent": dict(ranks.sent)}


def sequence(ranks) -> dict:
    """Attention over tokens that are split unevenly, grouped heads, causal and not; there and back."""
    found = {}
    for kv_heads, causal in ((4, True), (2, True), (1, False), (1, True)):
        q, k, v = (drawn(heads, 9, 8, seed=n) for n, heads in enumerate((4, kv_heads, kv_heads)))
        lengths = [5, 4] if ranks.world == 2 else [3, 2, 2, 2]
        first = sum(lengths[: ranks.rank])
        own = slice(first, first + lengths[ranks.rank])
        found[kv_heads, causal] = sequence_parallel.attention(ranks, q[:, own], k[:, own], v[:, own], lengths, causal)
    shares = [share(4, 4, ranks.world, n) for n in range(ranks.world)]
    mine = sequence_parallel.to_heads(ranks, q[:, own], lengths, shares, "q")
    found["heads"] = mine
    found["back"] = torch.equal(sequence_parallel.to_tokens(ranks, mine, lengths), q[:, own])
    return found


def spec_example(ranks) -> int:
    """Bytes that this rank sends of [8, 256, 64] float32 from tokens to heads."""
    x = drawn(8, 256 // ranks.world, 64, seed=ranks.rank)
    shares = [share(8, 8, ranks.world, n) for n in range(ranks.world)]
    sequence_parallel.to_heads(ranks, x, [256 // ranks.world] * ranks.world, shares, "q")
    return ranks.sent["to_heads"]


def failing(ranks):
    if ranks.rank:
        raise ValueError("on purpose")
    return ranks.all_reduce(torch.ones(2))

"""Run in a process of its own: vLLM's sampling operations on given inputs, without an engine. Prints what differs."""

from __future__ import annotations

import itertools

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from kvlab.decoding.law import Sampling, law
from kvlab.decoding.verify import Draft, Rows, verify


def filtered(z: torch.Tensor, own: Sampling) -> torch.Tensor:
    """vLLM's order and its code for top-k and top-p; min-p is the formula of its processor."""
    z = z.clone() / own.temperature
    p = z.softmax(-1)
    z = z.masked_fill(p < own.min_p * p.amax(-1, keepdim=True), -torch.inf)
    k = torch.tensor([own.top_k or z.shape[1]])
    return apply_top_k_top_p_pytorch(z, k, torch.tensor([own.top_p], dtype=z.dtype)).softmax(-1)


def laws() -> float:
    """The greatest difference of a probability over a grid."""
    z = 3 * torch.randn(1, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grid = itertools.product((0.5, 1.3), (0, 3, 60), (0.3, 0.9, 1), (0, 0.05))
    settings = [Sampling(*values) for values in grid]
    return max(float((law(z, [own], order="vllm").dense(200) - filtered(z, own)).abs().max()) for own in settings)


def rejections(runs: int = 300, depth: int = 4, size: int = 6) -> tuple[int, int]:
    """Accepted tokens that differ from vLLM's kernel on the same uniform numbers, and accepted tokens."""
    chance = torch.Generator().manual_seed(1)
    different = accepted = 0
    for _ in range(runs):
        logits = torch.randn(1, depth + 1, size, generator=chance)
        q = (logits[0, :-1] + 0.7 * torch.randn(depth, size, generator=chance)).softmax(-1)
        tokens = torch.multinomial(q, 1, generator=chance)[:, 0]
        u = torch.rand(depth, generator=chance)
        draws = iter([*u.tolist(), 0.5])
        exact = q.double()
        found = verify(Draft([tokens.tolist()], lambda _chain, i, q=exact: q[i]), Rows(logits, Sampling()), draws)
        out = torch.full((1, depth + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int64)
        torch.ops._C.rejection_random_sample_kernel_impl(
            out, torch.tensor([depth]), tokens, q.contiguous(), logits[0, :-1].softmax(-1).contiguous(),
            torch.tensor([[0]]), torch.full((depth,), size), u, torch.tensor([False]), depth, size, False,
        )  # fmt: skip
        theirs = out[0].tolist()
        kept = theirs.index(size) if size in theirs else depth  # the recovered token was given a number of its own
        different += kept != found.accepted or theirs[:kept] != tokens[:kept].tolist()
        accepted += kept
    return different, accepted


if __name__ == "__main__":
    print(f"{laws():.1e}", *rejections())

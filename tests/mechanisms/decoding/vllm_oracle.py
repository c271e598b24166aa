"""Run in a process of its own: vLLM's sampling operations on given inputs, without an engine. Prints what differs."""

from __future__ import annotations

import itertools

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from kvlab_mechanisms.decoding.law import Sampling, law
from kvlab_mechanisms.decoding.sampler import sample
from kvlab_mechanisms.decoding.verify import Draft, TargetLogits, verify


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
        found = verify(
            Draft([tokens.tolist()], lambda _chain, i, q=exact: q[i]), TargetLogits(logits, Sampling()), draws
        )
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


def processed() -> bool:
    """Whether the processor draws a request's tokens wherever vLLM moves its row, and leaves other requests alone."""
    from kvlab_mechanisms.decoding.vllm_processor import SamplerProcessor

    processor = SamplerProcessor(None, torch.device("cpu"), False)
    settings = [{"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "seed": seed} for seed in (3, 4)]
    written: list[list[int]] = [[], [], []]
    params = [*(SamplingParams(extra_args={"kvlab_sampling": one}) for one in settings), SamplingParams()]
    added = [(row, params[row], [1, 2, row], written[row]) for row in range(3)]
    updates = {0: BatchUpdate(3, [], added, []), 2: BatchUpdate(3, [], [], [(0, 2, MoveDirectionality.SWAP)])}
    updates |= {4: BatchUpdate(2, [1], [], [(2, 1, MoveDirectionality.UNIDIRECTIONAL)])}
    places, right = {0: 0, 1: 1, 2: 2}, True  # of each request, its row
    for step in range(6):
        processor.update_state(updates.get(step))
        places = {2: {0: 2, 1: 1, 2: 0}, 4: {0: 1, 2: 0}}.get(step, places)
        logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(step))[: len(places)]
        out = processor.apply(logits.clone())
        for request, row in places.items():
            if request == 2:
                right &= torch.equal(out[row], logits[row])
                continue
            seen = torch.tensor([1, 2, request, *written[request]])
            own = Sampling(**settings[request])
            token = int(sample(logits[row : row + 1], [own], [len(written[request])], [seen], "vllm"))
            right &= out[row].isfinite().nonzero()[:, 0].tolist() == [token]
            written[request].append(token)
    try:
        SamplerProcessor.validate_params(SamplingParams(extra_args={"kvlab_sampling": {"top_kk": 3}}))
    except ValueError as error:
        return right and "did you mean 'top_k'" in str(error)
    return False


if __name__ == "__main__":
    print(f"{laws():.1e}", *rejections(), processed())

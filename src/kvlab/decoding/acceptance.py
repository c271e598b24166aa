"""How much of what the model drafts over its coded cache the exact cache accepts: one number for each codec.

Of a text's windows each is a prompt; the model goes on from it, once for each codec (`compressed_drafter`), with the
same random numbers. At temperature 0 what is written is checked to be the plain greedy text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import nn

from kvlab.base.errors import Fault
from kvlab.base.recipe import Recipe
from kvlab.cache.hf_cache import Calibration
from kvlab.decoding.compressed_drafter import CompressedKVDrafter
from kvlab.decoding.law import Sampling
from kvlab.decoding.speculate import Report, plain, speculate


@dataclass(frozen=True)
class Acceptance:
    """What was accepted of one codec's drafts, over all prompts.

    Attributes
    ----------
    report : Report
    bits_per_value : float
        Of the coded caches at their end, positions included; mean over the prompts.
    seconds : float
        Of all the runs; the measuring of overlaps is in it.
    """

    report: Report
    bits_per_value: float
    seconds: float


def acceptance(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    recipe: Recipe,
    own: Sampling,
    *,
    tokens: int,
    draft: int,
    calibration: Calibration | None = None,
    greedy: Sequence[Sequence[int]] | None = None,
) -> Acceptance:
    """Run the drafter of a recipe on prompts; the i-th draws with ``own.seed + i``.

    Parameters
    ----------
    tokens, draft : int
        Written after each prompt, and in a draft at most.
    greedy : sequence of sequences of int or None
        What `plain_texts` wrote at temperature 0, to be compared with.

    Raises
    ------
    Fault
        A text differs from the plain greedy one by more than a tie in rounding explains.
    """
    pooled, bits, began = Report(), [], perf_counter()
    for i, prompt in enumerate(prompts):
        mine = replace(own, seed=own.seed + i)
        drafter = CompressedKVDrafter(model, recipe, mine, calibration)
        written = speculate(model, drafter, prompt, tokens, draft, mine, measure=True)
        if greedy is not None:
            refuse_other(model, prompt, written.tokens, greedy[i])
        pooled.drafted += written.report.drafted
        pooled.accepted += written.report.accepted
        pooled.overlaps += written.report.overlaps
        bits.append(drafter.cache.bits_per_value)
    return Acceptance(pooled, sum(bits) / len(bits), perf_counter() - began)


def plain_texts(model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int, own: Sampling) -> list[list[int]]:
    """What the model writes after each prompt without a drafter."""
    return [plain(model, prompt, tokens, replace(own, seed=own.seed + i)) for i, prompt in enumerate(prompts)]


@torch.no_grad()
def refuse_other(model: nn.Module, prompt: Sequence[int], told: Sequence[int], greedy: Sequence[int]) -> None:
    """`Fault` where two greedy texts part at logits that are further apart than rounding.

    A forward over several tokens and several forwards over one round differently; of two logits that are equal but for
    that either may be the greater.
    """
    at = next((i for i, (a, b) in enumerate(zip(told, greedy, strict=True)) if a != b), None)
    if at is None:
        return
    logits = model(torch.tensor([[*prompt, *told[:at]]], device=model.device)).logits[0, -1]
    apart = abs(float(logits[told[at]] - logits[greedy[at]]))
    if apart > 1e-3:
        raise Fault(
            f"token {at} is {told[at]} with the drafter and {greedy[at]} without, at logits {apart:.1e} apart: the"
            " verifier does not keep the target's law"
        )

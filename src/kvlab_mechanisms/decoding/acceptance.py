"""How much of what the model drafts over its coded cache the exact cache accepts: one number for each codec.

Of a text's windows each is a prompt; the model goes on from it, once for each codec (`CompressedKVDrafter`), with the
same random numbers. At temperature 0 what is written is checked to be the plain greedy text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvlab.cache.hf.kv_cache import Calibration, KVCache
from kvlab.core.errors import Fault
from kvlab.core.recipe import Recipe
from kvlab_mechanisms.decoding.law import Sampling, law
from kvlab_mechanisms.decoding.sampler import DRAFTER, drawn, uniform
from kvlab_mechanisms.decoding.speculate import SpeculationReport, plain, speculate
from kvlab_mechanisms.decoding.verify import Draft


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

    report: SpeculationReport
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
    pooled, bits, began = SpeculationReport(), [], perf_counter()
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


# Self-speculation: the same model over its own compressed cache drafts, and the exact cache verifies.


class BesideExact(KVCache):
    """A coded cache that follows an exact one: attention sees the exact one, and the same K and V are coded.

    So what is coded is what the target computed, not what a drafter made of its own errors.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, calibration: Calibration | None = None, **options):
        super().__init__(model, recipe, calibration, "serving", window_bytes=None, **options)
        self.exact: DynamicCache | None = DynamicCache(config=model.config)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Code K and V; attention is given the exact ones, or the coded ones on a drafter's own way."""
        seen = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return seen if self.exact is None else self.exact.update(key_states, value_states, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Both."""
        super().crop(tokens_to_remove)
        if self.exact is not None:
            self.exact.crop(tokens_to_remove)

    def coded_alone(self) -> BesideExact:
        """The coded cache on a way of its own, where attention sees what is coded; the blocks are shared."""
        twin = super().__deepcopy__({})
        twin.exact = None
        return twin

    def __deepcopy__(self, memo: dict) -> BesideExact:
        """Both on a way of their own."""
        twin = self.coded_alone()
        twin.exact = copy.deepcopy(self.exact, memo)
        return twin


class CompressedKVDrafter:
    """Drafts a chain with the model over its coded cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    recipe : Recipe
        Codecs of K and V.
    own : Sampling
        Of the target, whose temperature and filters the drafter takes over; at temperature 0 its drafts are greedy.
    calibration : Calibration or None
        For recipes that need one.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, own: Sampling, calibration: Calibration | None = None):
        self.model, self.own = model, own
        self.cache = BesideExact(model, recipe, calibration)

    @torch.no_grad()
    def draft(self, text: Sequence[int], tokens: int, step: int) -> Draft:
        """One chain; see `speculate.Drafter`."""
        own, chain, rows = replace(self.own, repetition_penalty=1.0), [], []
        ids, cache = [text[-1]], self.cache.coded_alone() if tokens else None
        for place in range(tokens):
            given = torch.tensor([ids], device=self.model.device)
            logits = self.model(given, past_key_values=cache, use_cache=True).logits[:, -1]
            found = law(logits, [own])
            ids = drawn(found, np.array([uniform(own.seed, step, place, DRAFTER)])).tolist()
            rows.append(found.dense(logits.shape[1])[0])
            chain += ids
        return Draft([chain], lambda _chain, depth: rows[depth])

    def observe(self, hidden: Tensor) -> None:
        """Nothing: the cache is all that it goes by."""

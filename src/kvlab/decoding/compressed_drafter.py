"""Self-speculation: the same model over its own compressed cache drafts, and the exact cache verifies.

QuantSpec (Tiwari et al. 2025, 2502.10424) and MagicDec (Sadhukhan et al. 2024, 2408.11049): reading the cache is what
decoding of long texts waits for, so a drafter that reads a coded one is cheap, and since its law differs from the
target's by the codec alone, much of what it drafts is accepted. The rate at which that happens, 1 - TV(p, q) in
expectation, is also a meter of the codec: how often a token that was sampled over the coded cache could have come from
the exact one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvlab.base.recipe import Recipe
from kvlab.cache.hf_cache import Calibration, KVCache
from kvlab.decoding.law import Sampling, law
from kvlab.decoding.philox import DRAFTER, uniform
from kvlab.decoding.sampler import drawn
from kvlab.decoding.verify import Draft


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

    def heard(self, hidden: Tensor) -> None:
        """Nothing: the cache is all that it goes by."""

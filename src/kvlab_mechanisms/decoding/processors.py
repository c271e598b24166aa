"""The sampler inside transformers' `generate`, with a seed for each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvlab_mechanisms.decoding.law import Order, Sampling, law
from kvlab_mechanisms.decoding.philox import uniform
from kvlab_mechanisms.decoding.sampler import drawn


class SamplerProcessor(LogitsProcessor):
    """Draws each row's token itself and leaves it as the only one, so that `generate`, sampling or not, takes it.

        model.generate(ids, do_sample=False, logits_processor=[SamplerProcessor([Sampling(0.8, top_k=50, seed=7)])])

    A processor serves one call of `generate`: what is there at the first token is the prompt. With padding on the left
    a row's tokens are what they are alone, but for the penalty, which transformers too lets see the padding.

    Parameters
    ----------
    settings : sequence of Sampling
        One for each row.
    order : {"hf", "vllm"}
    """

    def __init__(self, settings: Sequence[Sampling], order: Order = "hf"):
        self.settings, self.order, self._prompt = list(settings), order, -1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, vocabulary]: 0 at the token that was drawn, minus infinity elsewhere."""
        if self._prompt < 0:
            self._prompt = input_ids.shape[1]
        step = input_ids.shape[1] - self._prompt
        u = np.array([uniform(own.seed, step) for own in self.settings])
        tokens = torch.from_numpy(drawn(law(scores, self.settings, list(input_ids), self.order), u))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None].to(scores.device), 0.0)


class LawProcessor(LogitsProcessor):
    """The filters alone, as log-probabilities; `generate` draws with torch's own random numbers."""

    def __init__(self, settings: Sequence[Sampling], order: Order = "hf"):
        self.settings, self.order = list(settings), order

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, vocabulary]."""
        found = law(scores, self.settings, list(input_ids), self.order)
        return found.dense(scores.shape[1]).log().to(scores.device, scores.dtype)

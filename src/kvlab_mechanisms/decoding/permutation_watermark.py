"""Green lists as transformers makes them, for texts that its ``WatermarkLogitsProcessor`` marked.

Kirchenbauer et al. 2023 (2301.10226, algorithm 2, with the "lefthash" of their code): the token before seeds a
permutation of the whole vocabulary, whose beginning is green. Detection makes one permutation for each context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvlab.core.errors import ParamsError
from kvlab_mechanisms.decoding.watermark import FULL, Watermark


@dataclass(frozen=True)
class PermutationWatermark(Watermark):
    """A watermark with transformers' lists.

    Parameters
    ----------
    key : int
        Its ``hashing_key``.
    vocabulary : int
        As the processor was told.
    """

    vocabulary: int = 50_000

    def __post_init__(self):
        super().__post_init__()
        if self.width != 1 or self.secure:
            raise ParamsError("lists by permutation are of width 1 and have no secure hash")

    def contexts(self, ids: np.ndarray) -> np.ndarray:
        """Seeds of the generator that permutes, uint64."""
        seeds = [self.key * int(last) % (FULL - 1) for last in np.asarray(ids)[..., -1].ravel()]
        return np.array(seeds, np.uint64).reshape(np.shape(ids)[:-1])

    def green(self, tokens: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """See `Watermark`."""
        tokens, contexts = np.broadcast_arrays(tokens, contexts)
        found = np.zeros(tokens.shape, bool)
        for seed in np.unique(contexts):
            here = contexts == seed
            found[here] = self._list(int(seed))[tokens[here]]
        return found

    def green_list(self, size: int, contexts: np.ndarray) -> np.ndarray:
        """See `Watermark`."""
        return self.green(np.arange(size), contexts[..., None])

    def _list(self, seed: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        listed = np.zeros(self.vocabulary, bool)
        listed[torch.randperm(self.vocabulary, generator=generator)[: int(self.vocabulary * self.gamma)].numpy()] = True
        return listed

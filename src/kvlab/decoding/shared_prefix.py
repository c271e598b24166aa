"""A cache whose rows begin with one prefix, held once: parallel samples of a prompt.

Kwon et al. 2023 (PagedAttention, 2309.06180, section 4.4): samples of one prompt read the same pages and own what they
wrote. Here the prefix is one tensor that attention is shown n times, and each row has its own tokens after it:

.. math:: \\text{bytes} = \\text{prefix} + n \\cdot \\text{suffix}, \\quad \\text{not}\\quad
    n \\cdot (\\text{prefix} + \\text{suffix})
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvlab.base.errors import CapabilityError


class SharedLayer(DynamicLayer):
    """K and V of one layer: a prefix [1, heads, tokens, head_dim], and what the rows wrote since."""

    def __init__(self, k: Tensor, v: Tensor):
        super().__init__()
        self.prefix = k, v

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store new tokens [rows, heads, tokens, head_dim]; all that attention is to see, for this call alone."""
        own = super().update(key_states, value_states, *args, **kwargs)
        rows = len(key_states)
        return tuple(
            torch.cat([prefix.to(mine).expand(rows, -1, -1, -1), mine], dim=2)
            for prefix, mine in zip(self.prefix, own, strict=True)
        )

    def get_seq_length(self) -> int:
        """Tokens of each row, those of the prefix included."""
        return self.prefix[0].shape[2] + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: samples only grow."""
        raise CapabilityError("parallel samples cannot be cropped; begin anew from the prefix")

    @property
    def own_bytes(self) -> int:
        """Of what the rows wrote."""
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0


class SharedPrefixCache(Cache):
    """Rows that share one prefix.

    Parameters
    ----------
    layers : sequence of (Tensor, Tensor)
        K, after its rotary embedding, and V of the prefix by layer [1, heads, tokens, head_dim]: those of an ordinary
        cache, or `KVCache.decoded(layer)`, so that the samples go on from a coded prefix.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]]):
        if any(len(k) != 1 for k, _ in layers):
            raise CapabilityError("a shared prefix is one row; take it from a cache of one text")
        super().__init__(layers=[SharedLayer(k, v) for k, v in layers])

    @classmethod
    def of(cls, cache: Cache) -> SharedPrefixCache:
        """The first row of a transformers cache of tensors, or of a `KVCache`, as the prefix; nothing is copied."""
        if hasattr(cache, "decoded"):
            return cls([cache.decoded(layer) for layer in range(len(cache.layers))])
        return cls([(layer.keys[:1], layer.values[:1]) for layer in cache.layers])

    @property
    def prefix_bytes(self) -> int:
        """Of the prefix, once."""
        return sum(part.nbytes for layer in self.layers for part in layer.prefix)

    @property
    def nbytes(self) -> int:
        """Of everything that is held."""
        return self.prefix_bytes + sum(layer.own_bytes for layer in self.layers)

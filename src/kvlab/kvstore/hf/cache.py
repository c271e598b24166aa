"""What transformers takes for its cache, and what is a pager."""

from __future__ import annotations

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvlab.base.errors import CapabilityError
from kvlab.kvstore.paging.pager import Pager


class PagedCache(Cache):
    """K and V of one sequence, in a pager.

    It has no layers of its own, so that nothing but the pager knows how long the context is: whoever runs a forward
    with it gives positions and mask.

    Parameters
    ----------
    pager : Pager
        Has places for the tokens of the forward.
    order : {"logical", "slot"}
        See `Pager.gather`.
    """

    def __init__(self, pager: Pager, order: str = "logical"):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.pager, self.order = pager, order

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args, **_kwargs
    ) -> tuple[Tensor, Tensor]:
        """A layer's new rows into the pager, and the rows that attention reads out of it.

        Parameters
        ----------
        key_states, value_states : Tensor
            [1, kv_heads, n, head_dim], K after the rotary embedding.
        layer_idx : int

        Returns
        -------
        tuple of Tensor
            K and V [1, kv_heads, rows, head_dim].

        Raises
        ------
        CapabilityError
            For more than one sequence.
        """
        batch, _, n, _ = key_states.shape
        if batch != 1:
            raise CapabilityError(f"a paged cache holds one sequence; the forward has {batch}")
        self.pager.write(layer_idx, self.pager.length - n, key_states[0], value_states[0])
        rows = self.pager.gather(layer_idx, self.order)
        return rows.k[None], rows.v[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that have a place."""
        return self.pager.length

"""What vLLM's attention reads of its paged cache, looked up in the pages themselves.

The CPU kernel writes a step's K and V into the pages and then reads everything from there, the context that was
brought from outside and the tokens just computed alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from kvlab.engines.base import Reading
from kvlab.engines.hooks import installed
from kvlab.engines.vllm.pages import CachePlaces, found_out


@contextmanager
def reading(layers: Sequence[Any]) -> Iterator[Reading | None]:
    """Look at the pages of one sequence after each layer's attention; None where they are not on a CPU.

    Parameters
    ----------
    layers : sequence of Attention
        vLLM's, in order of depth.
    """
    if layers[0].kv_cache.device.type != "cpu":
        yield None
        return
    seen = Reading(attention=type(layers[0].impl).__name__)
    places = found_out(layers[0], layers[0].kv_cache)

    def look(number: int):
        """What notes K and V of one layer once its attention has run."""

        def noted(layer, _inputs, _output) -> None:
            metadata = get_forward_context().attn_metadata
            if metadata is not None:
                rows = _rows(layer, metadata[layer.layer_name], places)
                seen.tensors[number, "k"], seen.tensors[number, "v"] = rows

        return noted

    with installed([(layer, look(number)) for number, layer in enumerate(layers)]):
        yield seen


def _rows(layer: Any, metadata: Any, places: CachePlaces) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the step's only sequence, [kv_heads, tokens, head_dim] each."""
    size = layer.kv_cache.shape[2]
    positions = torch.arange(int(metadata.seq_lens[0]))
    blocks = metadata.block_table[0].to(torch.int64)[positions // size]
    return places.read(layer.kv_cache, blocks, positions % size)

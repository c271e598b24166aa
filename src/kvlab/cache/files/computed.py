"""The cache of a text, as transformers computes it: what `kvlab encode` codes."""

from __future__ import annotations

from contextlib import closing

from torch import Tensor

from kvlab.core.errors import ModelError
from kvlab.core.model import ModelInfo, load_tokenizer
from kvlab.core.recipe import Placement
from kvlab.engines.base import Part
from kvlab.engines.registry import start

FEWEST = 2  # tokens: a pass predicts at least one


def cache_of(
    info: ModelInfo, text: str, dtype: str, placement: Placement = "pre_rope"
) -> tuple[list[int], dict[tuple[int, str], Tensor]]:
    """The tokens of a text, and K and V of all of them by layer and stream [kv_heads, tokens, head_dim] in `dtype`.

    Parameters
    ----------
    dtype : {"float32", "bfloat16"}
        What the model computes in.
    placement : {"pre_rope", "post_rope"}
        Whether K is the one before its rotary embedding or the one after it.

    Raises
    ------
    ModelError
        The text has more tokens than the model has positions, or too few.
    """
    ids = load_tokenizer(info)(text)["input_ids"]
    if not FEWEST <= len(ids) < info.max_positions:
        raise ModelError(
            f"the text has {len(ids)} tokens; allowed: {FEWEST} to {info.max_positions - 1}", code="model.text-length"
        )
    kept: dict[tuple[int, str], Tensor] = {}

    def tap(layer: int, part: Part, x: Tensor) -> None:
        """Keep K and V."""
        if part != "q":
            kept[layer, part] = x.clone()

    with closing(start("hf", info, dtype, max_tokens=len(ids))) as engine:
        engine.score(ids, len(ids) - 2, tap, placement)
    return ids, kept

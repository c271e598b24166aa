"""Hugging Face transformers as an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer

from kvlab.engines.base import Engine, Part, Storage, Tap, refuse_broken_weights, refuse_unknown_placement
from kvlab.engines.hooks import installed, separate_projections
from kvlab.errors import ModelError
from kvlab.model import ModelInfo
from kvlab.recipe import Placement


class HFEngine(Engine):
    """A transformers model, on the GPU when there is one."""

    name = "hf"

    def __init__(self, info: ModelInfo, dtype: str, attention: str, max_tokens: int):
        super().__init__(info, dtype)
        self.attention = attention
        target = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = AutoModelForCausalLM.from_pretrained(
                info.path, dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"transformers cannot load {info.path}: {str(error).splitlines()[0]}") from None
        self.model = model.to(target).eval()
        refuse_broken_weights(self.model, info)

    @property
    def device(self) -> str:
        """The device in words."""
        return torch.cuda.get_device_name() if self.model.device.type == "cuda" else "cpu"

    @property
    def storage(self) -> Storage:
        """Activations of one pass, in no cache."""
        return Storage(str(self.model.dtype).removeprefix("torch."), "none", self.model.dtype.itemsize)

    @torch.inference_mode()
    def score(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> torch.Tensor:
        """See `Engine.score`."""
        refuse_unknown_placement(placement)
        tokens = torch.tensor([list(ids)], device=self.model.device)
        cache = TapCache(tap) if tap and placement == "post_rope" else None
        places = separate_projections(self.model, self.info, tap) if tap and cache is None else []
        with installed(places):
            output = self.model(tokens, use_cache=False, past_key_values=cache, logits_to_keep=len(ids) - first)
        return output.logits[0, :-1]


class TapCache(Cache):
    """A cache that keeps nothing: it hands K and V to a tap on their way to attention.

    A transformers model gives its cache K behind the rotary embedding and goes on with what the cache returns,
    whichever attention runs next. As no layer is ever added, the pass is masked as one without a cache.

    Parameters
    ----------
    tap : Tap
        Sees the K and V of one sequence.
    """

    def __init__(self, tap: Tap):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._tap = tap

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args, **_kwargs
    ) -> tuple[Tensor, Tensor]:
        """What attention is to use of a layer's K and V, [1, heads, tokens, head_dim] both."""
        return self._through(layer_idx, "k", key_states), self._through(layer_idx, "v", value_states)

    def _through(self, layer: int, part: Part, states: Tensor) -> Tensor:
        answer = self._tap(layer, part, states[0])
        if answer is None:
            return states
        # in the layout of what was given: another may make a matrix product round otherwise
        return torch.empty_like(states).copy_(answer)

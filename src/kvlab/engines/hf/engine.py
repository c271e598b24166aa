"""Hugging Face transformers as an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.core.errors import ModelError
from kvlab.core.model import ModelInfo, reason
from kvlab.core.recipe import Placement
from kvlab.core.tensors import tensor_headers
from kvlab.core.testimony import Proof
from kvlab.core.weights import weight_files
from kvlab.engines import products
from kvlab.engines.base import (
    ContextCache,
    Engine,
    Left,
    Part,
    Reading,
    Storage,
    Tap,
    context_of,
    gone_from,
    proof_of,
    refuse_broken_weights,
    refuse_unknown_placement,
    until,
)
from kvlab.engines.hf.rotary import Rotary
from kvlab.engines.hooks import attention_layers, decoder_layers, installed, separate_projections

# what a folder can make its loader raise
LOADING = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, ArithmeticError),
    *(AssertionError, SafetensorError, StrictDataclassError),
)


class HFEngine(Engine):
    """A transformers model, on the GPU when there is one."""

    name = "hf"

    def __init__(self, info: ModelInfo, dtype: str, attention: str, max_tokens: int):
        super().__init__(info, dtype)
        self.attention = attention
        self.model = _loaded(info, dtype, attention).to("cuda" if torch.cuda.is_available() else "cpu").eval()
        refuse_broken_weights(self.model, info)
        products.chosen_in(self.model)

    @property
    def device(self) -> str:
        """The device in words."""
        return torch.cuda.get_device_name() if self.model.device.type == "cuda" else "cpu"

    @property
    def storage(self) -> Storage:
        """Activations of one pass, in no cache."""
        return Storage(str(self.model.dtype).removeprefix("torch."), "none", self.model.dtype.itemsize)

    @property
    def proof(self) -> Proof:
        """See `Engine.proof`."""
        return proof_of(self.model, type(attention_layers(self.model, self.info)[0]), None)

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

    @torch.inference_mode()
    def score_over(self, ids: Sequence[int], cache: ContextCache, placement: Placement = "pre_rope") -> torch.Tensor:
        """See `Engine.score_over`: the model goes on from a filled cache."""
        filled = self.filled(cache, placement)
        return self._rows(ids[context_of(cache) :], filled, gone_from(cache))[:-1]

    @torch.inference_mode()
    def write_over(
        self,
        ids: Sequence[int],
        cache: ContextCache,
        tokens: int,
        draft: Sequence[int] = (),
        stop: Sequence[int] = (),
        placement: Placement = "pre_rope",
    ) -> list[int]:
        """See `Engine.write_over`."""
        filled, gone = self.filled(cache, placement), gone_from(cache)
        told, offered = list(ids[context_of(cache) :]), list(draft[:tokens])
        given = told + offered
        best = self._rows(given, filled, gone)[len(told) - 1 :].argmax(-1).tolist()
        agreed = next((i for i, token in enumerate(offered) if token != best[i]), len(offered))
        written = [*offered[:agreed], best[agreed]]
        if agreed < len(offered):
            filled.crop(agreed - len(offered))
        while len(written) < tokens and written[-1] not in stop:
            written.append(int(self._rows(written[-1:], filled, gone)[-1].argmax()))
        return until(written[:tokens], stop)

    def _rows(self, ids: Sequence[int], filled: DynamicCache, gone: int) -> torch.Tensor:
        """The logits of tokens that follow a cache, which takes them up; `gone` tokens before them left it."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        first, places = filled.get_seq_length() + gone, None
        if gone:  # by itself the model counts the tokens that are left
            places = torch.arange(first, first + len(ids), device=self.model.device)[None]
        return self.model(tokens, past_key_values=filled, position_ids=places, use_cache=True).logits[0]

    def filled(self, cache: ContextCache, placement: Placement = "pre_rope") -> DynamicCache:
        """A cache of the model's own kind that holds a context.

        Layers with a window hold all of it too: the model's mask says which of it they see.
        """
        refuse_unknown_placement(placement)
        context, filled = context_of(cache), DynamicCache()
        for layer in range(self.info.n_layers):
            turn = self.rotation(context, layer) if placement == "pre_rope" else None
            k, v = (cache[layer, part][None].to(self.model.device, self.model.dtype) for part in ("k", "v"))
            if isinstance(cache, Left):
                k = _turned_where_they_stood(turn, k, cache.places[layer], context)
            elif turn:
                k = turn(k)
            filled.update(k, v, layer)
        return filled

    def score_heard(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See `Engine.score_heard`."""
        with self._overheard() as inputs:
            return self.score(ids, first, tap, placement), inputs

    def score_over_heard(
        self, ids: Sequence[int], cache: ContextCache, placement: Placement = "pre_rope"
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See `Engine.score_over_heard`."""
        with self._overheard() as inputs:
            return self.score_over(ids, cache, placement), inputs

    @contextmanager
    def _overheard(self) -> Iterator[list[torch.Tensor]]:
        """What goes into each layer, as the layers are run."""
        found: list[torch.Tensor] = []
        layers = decoder_layers(self.model, self.info)
        with installed([(layer, lambda _layer, given: found.append(given[0])) for layer in layers], before=True):
            yield found

    def score_from(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        ids: Sequence[int],
        first: int,
        tap: Tap,
        placement: Placement = "pre_rope",
    ) -> torch.Tensor:
        """See `Engine.score_from`."""
        with self._started_at(layer, inputs):
            return self.score(ids, first, tap, placement)

    def score_over_from(
        self,
        layer: int,
        inputs: Sequence[torch.Tensor],
        ids: Sequence[int],
        cache: ContextCache,
        placement: Placement = "pre_rope",
    ) -> torch.Tensor:
        """See `Engine.score_over_from`."""
        with self._started_at(layer, inputs):
            return self.score_over(ids, cache, placement)

    @contextmanager
    def _started_at(self, layer: int, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Layers below `layer` hand on what is given in place of what they would compute."""
        below = decoder_layers(self.model, self.info)[:layer]
        try:
            for skipped in below:
                skipped.forward = lambda *_given, **_named: inputs[layer]
            yield
        finally:
            for skipped in below:
                del skipped.forward  # the instance's; the class's method shows again

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """See `Engine.reading`: a look at the arguments of the function that the model calls as its attention."""
        seen, chosen = Reading(), ALL_ATTENTION_FUNCTIONS.get_interface

        def choose(name: str, default: Callable) -> Callable:
            """The same function, and a note of what it is called with."""
            attend = chosen(name, default)

            def looked(module, query: Tensor, key: Tensor, value: Tensor, *rest, **named):
                seen.attention = attend.__name__
                seen.tensors[module.layer_idx, "k"], seen.tensors[module.layer_idx, "v"] = key[0], value[0]
                return attend(module, query, key, value, *rest, **named)

            return looked

        ALL_ATTENTION_FUNCTIONS.get_interface = choose
        try:
            yield seen
        finally:
            del ALL_ATTENTION_FUNCTIONS.get_interface  # the instance's; the class's method shows again

    def rotation(self, tokens: int, layer: int) -> Callable[[Tensor], Tensor]:
        """The model's own rotary embedding of a layer's K at positions 0 to `tokens` - 1, to the bit."""
        return self._rotation(tokens, self.rotary.kinds.index(self.rotary.kinds[layer]))

    def turned(self, layer: int, k: Tensor) -> Tensor:
        """See `Engine.turned`."""
        return self.rotation(k.shape[1], layer)(k[None])[0]

    @lru_cache(maxsize=8)  # noqa: B019 (an engine lives as long as its process measures)
    def _rotation(self, tokens: int, layer: int) -> Callable[[Tensor], Tensor]:
        cos, sin = self.rotary(layer, torch.arange(tokens, device=self.model.device)[None], self._like)
        return lambda k: self.rotary.apply(k, cos, sin)

    @cached_property
    def rotary(self) -> Rotary:
        """The rotary embedding of each layer."""
        return Rotary.of(self.model)

    @property
    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self.model.dtype, device=self.model.device)


def _loaded(info: ModelInfo, dtype: str, attention: str) -> PreTrainedModel:
    """The model with the weights of its files; `ModelError` where transformers filled one in, or left one out."""
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        # told here, for what config.json names as its attention would prevail over an argument beside it
        config = AutoConfig.from_pretrained(info.path, return_dict=True, **local)
        model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=_tensors(info.path, getattr(torch, dtype)),
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            output_loading_info=True,
        )
    except LOADING as error:
        raise ModelError(f"transformers cannot load {info.path}: {reason(error)}", code="model.not-loaded") from None
    for kind, entries in found.items():
        if entries:
            raise ModelError(
                f"transformers loads {info.path} with {kind}: {', '.join(sorted(map(str, entries))[:3])}",
                code="model.other-tensors",
            )
    return model


def _tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a model's files, read one at a time: pages of a file that stays open would lie beside them."""
    found = {}
    for name, one in tensor_headers(weight_files(path)).items():
        with safe_open(one.file, "pt") as file:
            found[name] = file.get_tensor(name).to(dtype)
    return found


def _turned_where_they_stood(turn: Callable[[Tensor], Tensor], k: Tensor, places: Tensor, context: int) -> Tensor:
    """K [1, kv_heads, left, head_dim] after the rotary embedding of its own positions."""
    whole = k.new_zeros(*k.shape[:2], context, k.shape[-1])
    whole[:, :, places] = k
    return turn(whole)[:, :, places]


class TapCache(Cache):
    """A cache that keeps nothing: it hands K and V to a tap on their way to attention.

    A transformers model gives its cache K after the rotary embedding and goes on with what the cache returns,
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

"""A cache that is filled in one process and read in another: prefill and decode apart.

DistServe (Zhong et al. 2024, 2401.09670), Splitwise (Patel et al. 2024, 2311.18677) and Mooncake (Qin et al. 2024,
2407.00079) give the two phases of serving machines of their own; what goes from one to the other is K and V. Here it is
the stream of `kvlab_mechanisms.memory.wire`, exact, or as a codec stores it: the frames of
`kvlab.codecs.stream.bitstream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvlab.cache.hf.rope import turns_of
from kvlab.cache.rope_turn import RopeTurn
from kvlab.calibration.load import Calibrated
from kvlab.codecs.base import Codec, Site
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import StreamError, UserError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Recipe
from kvlab_mechanisms.memory.wire import STREAMS, StreamHead

Place = tuple[int, str]  # layer, and "k" or "v"


class Exact:
    """K and V as they are."""

    name = ""

    def head(self, info: ModelInfo, cache: DynamicCache, sequence: str) -> StreamHead:
        """What the stream says of itself."""
        keys = cache.layers[0].keys
        dtype = str(keys.dtype).removeprefix("torch.")
        sizes = (len(cache.layers), keys.shape[1], keys.shape[3], keys.shape[2])
        return StreamHead(info.model_hash, self.name, dtype if not self.name else "uint8", *sizes, sequence, "after")

    def payloads(self, cache: DynamicCache) -> Iterator[tuple[Place, Tensor]]:
        """Layer by layer, K before V, so that a layer is on its way while the next is made ready."""
        for number, layer in enumerate(cache.layers):
            yield (number, "k"), self.packed(layer.keys[0], Site(0, number, "k"))
            yield (number, "v"), self.packed(layer.values[0], Site(0, number, "v"))

    def packed(self, x: Tensor, _site: Site) -> Tensor:
        """What is sent of [kv_heads, tokens, head_dim]."""
        return x

    def unpacked(self, data: Tensor, _place: Place, dtype: torch.dtype) -> Tensor:
        """[kv_heads, tokens, head_dim] out of what came, in memory of its own."""
        return data.to(dtype, copy=True)


class CodedWire(Exact):
    """K and V as a recipe's codecs store them.

    Parameters
    ----------
    recipe : Recipe
    config : PreTrainedConfig
        Of the model: a recipe that codes K before its rotary embedding has it turned back.
    head_dim : int
    calibrated : Calibrated, optional
        For a recipe that needs one; both sides need the same.
    """

    def __init__(self, recipe: Recipe, config, head_dim: int, calibrated: Calibrated | None = None):
        fitted = calibrated.calibration_hash if calibrated else "none"
        self.name = f"{recipe.recipe_id}:{fitted}"
        self._recipe, self._config, self._head_dim, self._calibrated = recipe, config, head_dim, calibrated
        self._codecs: dict[str, Codec] = {s: self._built(s) for s in STREAMS}
        self._turns: list[RopeTurn] = []  # by layer

    def _built(self, stream: str) -> Codec:
        own = getattr(self._recipe, stream)
        fitted = self._calibrated
        return build(own, fitted.stream(own, stream, self._recipe.placement) if fitted else None)

    def _turned(self, layer: int, tokens: int) -> RopeTurn | None:
        """The rotary embedding that a layer's K is coded without; None where it is coded with it."""
        if self._recipe.placement == "post_rope":
            return None
        if not self._turns or len(self._turns[0].cos) < tokens:
            self._turns = turns_of(self._config, self._head_dim, max(tokens, 256), torch.float32)
        return self._turns[layer]

    def packed(self, x: Tensor, site: Site) -> Tensor:
        """A frame, uint8 [bytes]."""
        turn = self._turned(site.layer, x.shape[1]) if site.stream == "k" else None
        x = turn.undo(x.cpu(), 0) if turn else x
        return torch.frombuffer(bytearray(frame_bytes(self._codecs[site.stream].encode(x, site))), dtype=torch.uint8)

    def unpacked(self, data: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
        """See `Exact`; `StreamError` where the frame is of another layer or stream."""
        layer, stream = place
        encoded = read_frame(data.numpy().tobytes())
        if (encoded.layer, encoded.stream) != place:
            raise StreamError(f"layer {layer} {stream} holds the frame of layer {encoded.layer} {encoded.stream}")
        x = self._codecs[stream].decode(encoded)
        turn = self._turned(layer, x.shape[1]) if stream == "k" else None
        return (turn.redo(x, 0) if turn else x).to(dtype)

    def round_trip(self, cache: DynamicCache, dtype: torch.dtype) -> dict[Place, Tensor]:
        """What the other side would read, without leaving this process."""
        return {place: self.unpacked(data, place, dtype) for place, data in self.payloads(cache)}


@dataclass(frozen=True)
class Prefilled:
    """A prompt that was read.

    Attributes
    ----------
    cache : DynamicCache
    logits : Tensor
        Of the token after the prompt, float32 [vocabulary].
    first : int
        The likeliest one, which is the first of the answer.
    """

    cache: DynamicCache
    logits: Tensor
    first: int


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: Sequence[int]) -> Prefilled:
    """Read a prompt in one forward."""
    if not prompt:
        raise UserError("a prompt has at least one token", code="user.empty-prompt")
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt)], device=model.device)
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float().cpu()
    return Prefilled(cache, logits, int(logits.argmax()))


class DecodingWorker:
    """Sequences whose prompts were read elsewhere.

    Parameters
    ----------
    model : PreTrainedModel
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._caches: dict[str, DynamicCache] = {}
        self._last: dict[str, int] = {}

    def load(self, sequence: str, found: Mapping[Place, Tensor], first: int) -> int:
        """Take a cache; returns its tokens.

        Raises
        ------
        UserError
            There is a sequence of this name.
        StreamError
            Layers are missing, or not as long as one another.
        """
        if sequence in self._caches:
            raise UserError(f"sequence {sequence!r} is loaded already; unload it first", code="user.sequence-loaded")
        layers = self.model.config.num_hidden_layers
        places = {(layer, s) for layer in range(layers) for s in STREAMS}
        if found.keys() != places or len({one.shape[1] for one in found.values()}) > 1:
            raise StreamError(f"what came is no whole cache of {layers} layers")
        cache = DynamicCache(config=self.model.config)
        for layer in range(layers):
            k, v = (found[layer, s][None].to(self.model.device) for s in STREAMS)
            cache.update(k, v, layer)
        self._caches[sequence], self._last[sequence] = cache, first
        return cache.get_seq_length()

    @torch.no_grad()
    def step(self, sequence: str, token: int | None = None) -> tuple[int, Tensor]:
        """One forward over the last token, or over one that is given.

        Returns
        -------
        (int, Tensor)
            The likeliest next token, and its logits, float32 [vocabulary].
        """
        cache = self._known(sequence)
        ids = torch.tensor([[self._last[sequence] if token is None else token]], device=self.model.device)
        logits = self.model(ids, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu()
        self._last[sequence] = int(logits.argmax())
        return self._last[sequence], logits

    def tokens(self, sequence: str) -> int:
        """How long a cache is."""
        return self._known(sequence).get_seq_length()

    def unload(self, sequence: str) -> None:
        """Forget a sequence, and give its memory back."""
        self._known(sequence)
        del self._caches[sequence], self._last[sequence]

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of sequences."""
        return tuple(self._caches)

    def _known(self, sequence: str) -> DynamicCache:
        if sequence not in self._caches:
            raise UserError(
                f"sequence {sequence!r} is not loaded; loaded: {', '.join(self._caches) or 'none'}",
                code="user.sequence-not-loaded",
            )
        return self._caches[sequence]

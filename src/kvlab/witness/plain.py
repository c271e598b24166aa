"""A decoder's forward, written out: every layer's K and V stand in the open and can be given instead of computed.

Nothing of transformers takes part, and nothing of `engines`: the weights are read from the safetensors files,
config.json says what is done with them, and norms, rotary embedding, attention and MLP are written out here, all in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kvlab.core.decoder import Decoder
from kvlab.core.model import read_config
from kvlab.core.params import ModelEntry
from kvlab.core.tensors import HEAD, model_tensors
from kvlab.witness.weights import Weights

CacheTensors = Mapping[tuple[int, str], Tensor]
"""(layer, ``"k"`` or ``"v"``) -> [kv_heads, tokens, head_dim], of a window's first tokens."""


@dataclass
class PlainPass:
    """What one forward gave.

    Parameters
    ----------
    logits : Tensor
        [tokens - first, vocabulary] float32; the last row, which predicts no token of the window, is left out.
    own : dict
        By layer and stream, K before its rotary embedding and V as the layer computed them, of the tokens that ran.
    read : dict
        The same as attention used them: K after its rotary embedding, and what was given in its place.
    """

    logits: Tensor
    own: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    read: dict[tuple[int, str], Tensor] = field(default_factory=dict)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class PlainModel:
    """A Llama, Mistral, Qwen2, Qwen3 or Gemma 3 model, in float32.

    Parameters
    ----------
    folder : Path
        With config.json and safetensors.

    Raises
    ------
    ModelError
        The files do not hold the model of config.json; see `kvlab.core.tensors`.
    """

    def __init__(self, folder: Path):
        self._decoder, held = model_tensors(folder, read_config(ModelEntry(path=str(folder))))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        needed = self._decoder.tensors()
        self._weights = Weights({name: held[name].file for name in needed}, needed, self._device)
        self._last: tuple[tuple, PlainPass] | None = None

    def clean(self, ids: Sequence[int], first: int) -> PlainPass:
        """`forward` of the untouched model; that of the last window is kept, as many cells are asked of one."""
        call = (tuple(ids), first)
        if self._last is None or self._last[0] != call:
            self._last = call, self.forward(ids, first)
        return self._last[1]

    def rotated(self, layer: int, k: Tensor) -> Tensor:
        """A layer's K [kv_heads, tokens, head_dim] of positions from 0 on, after its rotary embedding, float32."""
        return _rotate(self._on(k), self._turns(k.shape[1])[layer], 0)

    @torch.inference_mode()
    def forward(
        self,
        ids: Sequence[int],
        first: int,
        held: CacheTensors | None = None,
        begin: int = 0,
        rotated: bool = False,
        attend: Callable[[int, Tensor, Tensor, Tensor, float, int], Tensor] | None = None,
    ) -> PlainPass:
        """Run a window's tokens from `begin` on.

        Parameters
        ----------
        ids : sequence of int
            The whole window.
        first : int
            First position whose logits are wanted.
        held : CacheTensors, optional
            K and V that attention uses for the first tokens, of any layers; of all layers and at least `begin` tokens
            where `begin` is not 0.
        rotated : bool
            Whether the given K is after its rotary embedding.
        attend : callable, optional
            Another attention than that over everything; see `witness.reading`.
        """
        held, table = held or {}, "model.embed_tokens.weight"
        hidden = self._weights.rows(table, torch.tensor(list(ids[begin:]), device=self._device))
        if self._decoder.gemma:
            hidden = hidden * self._decoder.hidden**0.5
        found = PlainPass(hidden)
        for number, rotary in enumerate(self._turns(len(ids))):
            q, k, v = self._projected(number, self._normed(number, "input_layernorm", hidden))
            found.own[number, "k"], found.own[number, "v"] = k, v
            k_held, v_held = (self._on(held.get((number, part))) for part in ("k", "v"))
            if k_held is not None and not rotated:
                k_held = _rotate(k_held, rotary, 0)
            k, v = _joined(k_held, _rotate(k, rotary, begin), begin), _joined(v_held, v, begin)
            found.read[number, "k"], found.read[number, "v"] = k, v
            given = _rotate(q, rotary, begin), k, v, self._decoder.score_scale, begin
            attended = attend(number, *given) if attend else _attention(*given, self._decoder.layers[number].window)
            hidden = self._added(number, hidden, self._mapped(number, "self_attn.o_proj", attended))
        last = self._norm(hidden[first - begin : -1], self._weights.get("model.norm.weight"))
        head = table if self._decoder.tied else HEAD
        found.logits = torch.cat([last @ rows.T for rows in self._weights.blocks(head)], dim=1)
        return found

    def _added(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """What comes out of a layer, of what came in and what its attention made of it."""
        if not self._decoder.gemma:
            hidden = hidden + attended
            return hidden + self._mlp(layer, self._normed(layer, "post_attention_layernorm", hidden))
        hidden = hidden + self._normed(layer, "post_attention_layernorm", attended)
        inner = self._mlp(layer, self._normed(layer, "pre_feedforward_layernorm", hidden))
        return hidden + self._normed(layer, "post_feedforward_layernorm", inner)

    def _turns(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """By layer, cosine and sine of every position's angles, [tokens, head_dim] each; layers alike share them."""
        ropes = [layer.rope for layer in self._decoder.layers]
        made = {id(rope): tuple(x.to(self._device) for x in turns(self._decoder, rope, tokens)) for rope in ropes}
        return [made[id(rope)] for rope in ropes]

    def _of(self, layer: int, name: str) -> Tensor | None:
        return self._weights.get(f"model.layers.{layer}.{name}")

    def _mapped(self, layer: int, name: str, x: Tensor) -> Tensor:
        """A linear map of a layer, with its bias where it has one."""
        return functional.linear(x, self._of(layer, f"{name}.weight"), self._of(layer, f"{name}.bias"))

    def _normed(self, layer: int, name: str, x: Tensor) -> Tensor:
        return self._norm(x, self._of(layer, f"{name}.weight"))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(x, 1 + weight if self._decoder.gemma else weight, self._decoder.epsilon)

    def _projected(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of one layer, [heads, tokens, head_dim] each; after the norms of Q and K where there are some."""
        parts = []
        for name in ("q", "k", "v"):
            heads = self._mapped(layer, f"self_attn.{name}_proj", x).view(len(x), -1, self._decoder.head_dim)
            if name != "v" and self._decoder.qk_norm:
                heads = self._normed(layer, f"self_attn.{name}_norm", heads)
            parts.append(heads.transpose(0, 1))
        return tuple(parts)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        """A gated MLP (Shazeer 2020, arXiv 2002.05202)."""
        gate = ACTIVATIONS[self._decoder.activation](self._mapped(layer, "mlp.gate_proj", x))
        return self._mapped(layer, "mlp.down_proj", gate * self._mapped(layer, "mlp.up_proj", x))

    def _on(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self._device, torch.float32)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root mean square norm over the last axis (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon))


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor], begin: int) -> Tensor:
    """RoPE (Su et al. 2021, arXiv 2104.09864) in halves: dimension i turns with dimension i + head_dim / 2."""
    cos, sin = (turn[begin : begin + x.shape[1]] for turn in turns)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def _joined(given: Tensor | None, own: Tensor, begin: int) -> Tensor:
    """K or V of all tokens from 0 on: those that are given, then those that were computed from `begin` on."""
    if given is None:
        return own
    return torch.cat([given, own[:, given.shape[1] - begin :]], dim=1)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, begin: int, window: int | None) -> Tensor:
    """Causal softmax attention (Vaswani et al. 2017), [tokens, heads * head_dim]; neighbours share a KV head.

    With a window, over the last tokens alone (Beltagy et al. 2020, arXiv 2004.05150).
    """
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    places = torch.arange(k.shape[1], device=q.device)
    ago = places[begin:, None] - places[None, :]
    unseen = (ago < 0) | (ago >= (window or len(places)))
    weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
    return (weights @ v).transpose(0, 1).reshape(q.shape[1], -1)


# Rotary embeddings by their papers: how fast each pair of dimensions turns, and how much attention is scaled.


def turns(decoder: Decoder, rope: dict, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of a rotary embedding's angles at positions 0.., float32 [tokens, head_dim] each."""
    speeds, scale = _speeds(decoder, rope, tokens)
    angles = torch.arange(tokens).float()[:, None] * speeds
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def _speeds(decoder: Decoder, rope: dict, tokens: int) -> tuple[Tensor, float]:
    """Radians that a pair turns by each token, float32 [head_dim / 2], and the scale of cosine and sine."""
    size, theta = decoder.head_dim, rope["rope_theta"]
    kind, factor = rope["rope_type"], rope.get("factor", 1.0)
    if kind == "dynamic":  # bloc97 and emozilla 2023: the base grows with what is longer than the model was trained for
        longer = factor * max(tokens, decoder.max_positions) / decoder.max_positions - (factor - 1)
        theta = theta * longer ** (size / (size - 2))
    speeds = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)  # Su et al. 2021, arXiv 2104.09864
    if kind in ("linear", "proportional"):  # Chen et al. 2023, arXiv 2306.15595: positions closer together
        return speeds / factor, 1.0
    if kind == "llama3":
        return _by_wavelength(speeds, rope), 1.0
    if kind == "yarn":
        return _by_rotations(speeds, rope, size), _yarn_scale(rope)
    if kind == "longrope":
        return _by_pair(speeds, decoder, rope, tokens)
    return speeds, 1.0


def _by_wavelength(speeds: Tensor, rope: dict) -> Tensor:
    """Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783): long waves are slowed, short ones not, a ramp between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = rope["original_max_position_embeddings"] / (2 * math.pi / speeds)  # in the length that was trained on
    share = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - share) * speeds / rope["factor"] + share * speeds


def _by_rotations(speeds: Tensor, rope: dict, size: int) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): as `_by_wavelength`, the ramp by dimension."""
    length, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def dimension(rotations: float) -> float:
        """The one that turns so often over the length that was trained on."""
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    slowed = ((torch.arange(size // 2).float() - first) / (last - first or 0.001)).clamp(0, 1)
    return speeds / rope["factor"] * slowed + speeds * (1 - slowed)


def _yarn_scale(rope: dict) -> float:
    """Of YaRN's cosine and sine: the square root of its temperature."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def _by_pair(speeds: Tensor, decoder: Decoder, rope: dict, tokens: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each pair has a factor, others beyond the length trained on."""
    trained = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or decoder.max_positions / trained
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    pairs = rope["long_factor" if tokens > trained else "short_factor"]
    return speeds / torch.tensor(pairs, dtype=torch.float32), scale

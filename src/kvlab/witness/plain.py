"""A decoder's forward, written out: every layer's K and V stand in the open and can be given instead of computed.

The weights, norms and rotary embedding are transformers' own modules, called one by one in float32. No hook, no cache
class, no attention function and no mask of transformers takes part, and nothing of `engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvlab.witness.scores import log_softmax

Held = Mapping[tuple[int, str], Tensor]
"""(layer, ``"k"`` or ``"v"``) -> [kv_heads, tokens, head_dim], of a window's first tokens."""


@dataclass
class Passed:
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

    @cached_property
    def log_p(self) -> np.ndarray:
        """Logarithms of the probabilities that the logits stand for, float64."""
        return log_softmax(self.logits.to("cpu", torch.float64).numpy())


class PlainModel:
    """A Llama, Mistral, Qwen2 or Qwen3 model, in float32.

    Parameters
    ----------
    folder : Path
        With config.json and safetensors.
    """

    def __init__(self, folder: Path):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        self._whole = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self._body = self._whole.model
        self._last: tuple[tuple, Passed] | None = None

    def clean(self, ids: Sequence[int], first: int) -> Passed:
        """`forward` of the untouched model; that of the last window is kept, as many cells are asked of one."""
        asked = (tuple(ids), first)
        if self._last is None or self._last[0] != asked:
            self._last = asked, self.forward(ids, first)
        return self._last[1]

    def rotated(self, k: Tensor) -> Tensor:
        """K [kv_heads, tokens, head_dim] of positions from 0 on, after its rotary embedding, float32."""
        device = self._whole.device
        return _rotate(_on(k, device), _turns(self._body, k.shape[1], device), 0)

    @torch.inference_mode()
    def forward(
        self,
        ids: Sequence[int],
        first: int,
        held: Held | None = None,
        begin: int = 0,
        rotated: bool = False,
        attend: Callable[[int, Tensor, Tensor, Tensor, float, int], Tensor] | None = None,
    ) -> Passed:
        """Run a window's tokens from `begin` on.

        Parameters
        ----------
        ids : sequence of int
            The whole window.
        first : int
            First position whose logits are wanted.
        held : Held, optional
            K and V that attention uses for the first tokens, of any layers; of all layers and at least `begin` tokens
            where `begin` is not 0.
        rotated : bool
            Whether the given K is after its rotary embedding.
        attend : callable, optional
            Another attention than that over everything; see `witness.reading`.
        """
        body, held = self._body, held or {}
        device = self._whole.device
        hidden = body.embed_tokens(torch.tensor(list(ids[begin:]), device=device))
        turns = _turns(body, len(ids), device)
        found = Passed(hidden)
        for number, layer in enumerate(body.layers):
            x = layer.input_layernorm(hidden)
            q, k, v = _projected(layer.self_attn, x)
            found.own[number, "k"], found.own[number, "v"] = k, v
            k_held, v_held = (_on(held.get((number, part)), device) for part in ("k", "v"))
            if k_held is not None and not rotated:
                k_held = _rotate(k_held, turns, 0)
            k, v = _joined(k_held, _rotate(k, turns, begin), begin), _joined(v_held, v, begin)
            found.read[number, "k"], found.read[number, "v"] = k, v
            given = _rotate(q, turns, begin), k, v, layer.self_attn.scaling, begin
            attended = attend(number, *given) if attend else _attention(*given)
            hidden = hidden + layer.self_attn.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        found.logits = self._whole.lm_head(body.norm(hidden[first - begin : -1]))
        return found


def _turns(body: torch.nn.Module, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, [tokens, head_dim] each."""
    cos, sin = body.rotary_emb(torch.empty(0, device=device), torch.arange(tokens, device=device)[None])
    return cos[0], sin[0]


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor], begin: int) -> Tensor:
    """RoPE (Su et al. 2021, arXiv 2104.09864) in halves: dimension i turns with dimension i + head_dim / 2."""
    cos, sin = (turn[begin : begin + x.shape[1]] for turn in turns)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def _projected(attention: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of one layer, [heads, tokens, head_dim] each; after the norms of Q and K where there are some."""
    parts = []
    for name in ("q", "k", "v"):
        flat = getattr(attention, f"{name}_proj")(x)
        heads = flat.view(len(x), -1, attention.head_dim)
        norm = getattr(attention, f"{name}_norm", None)
        parts.append((heads if norm is None else norm(heads)).transpose(0, 1))
    return tuple(parts)


def _joined(given: Tensor | None, own: Tensor, begin: int) -> Tensor:
    """K or V of all tokens from 0 on: those that are given, then those that were computed from `begin` on."""
    if given is None:
        return own
    return torch.cat([given, own[:, given.shape[1] - begin :]], dim=1)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, begin: int) -> Tensor:
    """Causal softmax attention (Vaswani et al. 2017), [tokens, heads * head_dim]; neighbours share a KV head."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    places = torch.arange(k.shape[1], device=q.device)
    future = places[None, :] > (places[begin:, None])
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return (weights @ v).transpose(0, 1).reshape(q.shape[1], -1)


def _on(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device, torch.float32)

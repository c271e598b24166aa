"""K and V of the first layer from the token ids: before the rotary embedding they depend on nothing else.

Embedding, norm and projection are repeated in whole numbers (`exact`), so that a decoder comes to what the encoder came
to; what the model itself made of them differs by rounding, and is coded as any other difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from kvlab.codecs.archive.exact import VALUE, ExactMap, mapped, power_of_two
from kvlab.core.errors import CapabilityError, UserError
from kvlab.core.model import ModelInfo, weight_files

KNOWN = ("llama", "mistral", "qwen2", "qwen3", GEMMA := "gemma3_text")
"""Types whose first layer is embedding, RMS norm, projection and, in qwen3 and gemma3, RMS norm of K by head."""
EMBEDDING = 20  # bits of an embedding's values: their squares are added up
NORMED = 16  # binary places of what a norm gives


class FirstLayer:
    """The first layer's K and V of given tokens.

    Parameters
    ----------
    info : ModelInfo
        The model; of its weights the projections of one layer are read, and the embeddings of the tokens asked for.

    Raises
    ------
    CapabilityError
        Models of this type compute them in a way that is not known here.
    """

    def __init__(self, info: ModelInfo):
        self.info = info
        self.config = AutoConfig.from_pretrained(info.path, trust_remote_code=False, local_files_only=True)
        if self.config.model_type not in KNOWN:
            raise CapabilityError(
                f"how models of type {self.config.model_type!r} make K and V of their first layer is not known here;"
                f" known: {', '.join(KNOWN)}"
            )

    def rows(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """K and V before the rotary embedding, float64 [tokens, kv_heads * head_dim] each, to the bit on any machine.

        Raises
        ------
        UserError
            An id is not in the vocabulary.
        """
        wrong = [token for token in ids if not 0 <= token < self.config.vocab_size]
        if wrong:
            raise UserError(f"token {wrong[0]} is not in the vocabulary; allowed: 0..{self.config.vocab_size - 1}")
        hidden = _normed(self._embedded(ids), self._weights["norm"], self.config.rms_norm_eps)
        k, v = (self._projected(hidden, part) for part in ("k", "v"))
        if "k_norm" in self._weights:
            k = k.unflatten(1, (self.info.n_kv_heads, -1))
            k = _normed(k, self._weights["k_norm"], self.config.rms_norm_eps).flatten(1)
        return k, v

    def _projected(self, hidden: Tensor, part: str) -> Tensor:
        most = float((1 << VALUE) - 1)
        whole = (hidden * 2.0**NORMED).round().clamp(-most, most)
        found = mapped(whole, ExactMap.of(self._weights[part]).working(VALUE)) * 2.0**-NORMED
        return found + self._weights[f"{part}_bias"] if f"{part}_bias" in self._weights else found

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        """Embeddings, float64 [tokens, hidden]; each is read once."""
        known = sorted(set(ids))
        with safe_open(self._files["model.embed_tokens.weight"], "pt") as file:
            table = file.get_slice("model.embed_tokens.weight")
            rows = torch.stack([table[token] for token in known]).double()
        rows = rows * self.config.hidden_size**0.5 if self.config.model_type == GEMMA else rows
        return rows[torch.searchsorted(torch.tensor(known), torch.tensor(list(ids)))]

    @cached_property
    def _files(self) -> dict[str, str]:
        found = {}
        for path in weight_files(self.info.path):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """By short names, float64; projections [hidden, width]."""
        layer = "model.layers.0."
        names = {
            "norm": f"{layer}input_layernorm.weight",
            "k_norm": f"{layer}self_attn.k_norm.weight",
            **{part: f"{layer}self_attn.{part}_proj.weight" for part in ("k", "v")},
            **{f"{part}_bias": f"{layer}self_attn.{part}_proj.bias" for part in ("k", "v")},
        }
        found = {}
        for short, name in names.items():
            if name in self._files:
                with safe_open(self._files[name], "pt") as file:
                    found[short] = file.get_tensor(name).double()
        if self.config.model_type == GEMMA:  # whose norms multiply by 1 + their weight
            found |= {name: 1 + found[name] for name in ("norm", "k_norm")}
        return found | {part: found[part].mT.contiguous() for part in ("k", "v")}


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last axis; the sum of squares is one of whole numbers, all else is rounded as IEEE 754 says."""
    places = EMBEDDING - torch.frexp(x.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)).exponent
    whole = (x * power_of_two(places)).round()
    mean = whole.square().sum(-1, keepdim=True) / x.shape[-1] * power_of_two(-2 * places)
    return x / torch.sqrt(mean + epsilon) * weight

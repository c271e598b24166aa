"""The rotary embedding of each layer of a transformers model.

A model has one rotary module. Where kinds of layers turn K by angles of their own, as in Gemma 3, it is told the kind
beside the positions; otherwise all layers share what it gives.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvlab.core.errors import CapabilityError


@dataclass(frozen=True)
class Rotary:
    """A model's rotary module, and what it is told of each layer.

    Parameters
    ----------
    module : nn.Module
        Called with a tensor of K's dtype and device, positions, and the kind of layer where there is one.
    kinds : tuple of str or None
        By layer; None where the module is told nothing.
    """

    module: nn.Module
    kinds: tuple[str | None, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Rotary:
        """That of a model; `CapabilityError` when it has none, or more than one."""
        found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
        if len(found) != 1:
            raise CapabilityError(
                f"the model has {len(found)} rotary modules, K can be turned back for one",
                code="capability.rotary-modules",
            )
        layers = model.config.num_hidden_layers
        told = "layer_type" in inspect.signature(found[0].forward).parameters
        return cls(found[0], tuple(model.config.layer_types) if told else (None,) * layers)

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> Rotary:
        """That of a model of this configuration, none of whose weights is read."""
        own = copy.deepcopy(config)  # transformers writes the attention into what it is given
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(own, attn_implementation="eager", trust_remote_code=False)
        found = cls.of(skeleton)
        # anew: the skeleton's holds no numbers
        return cls(type(found.module)(config=skeleton.config), found.kinds)

    def __call__(self, layer: int, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of a layer's angles at positions [rows, tokens], with head_dim after, in `like`'s dtype."""
        kind = self.kinds[layer]
        return self.module(like.new_empty(0), positions, *([] if kind is None else [kind]))

    def apply(self, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """K [rows, heads, tokens, head_dim] turned by the model's own function, to the bit."""
        turn = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        return turn(k[:, :1], k, cos, sin)[1]  # it wants queries too: one head of something

    def rope_type(self, layer: int) -> str:
        """The kind of a layer's embedding, such as ``default``."""
        said = getattr(self.module, "rope_type", "default")
        return said[self.kinds[layer]] if isinstance(said, dict) else said

    def distinct(self) -> list[int]:
        """The first layer of each kind."""
        return [self.kinds.index(kind) for kind in dict.fromkeys(self.kinds)]

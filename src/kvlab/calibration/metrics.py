"""What errors of a model's K and V are weighed by, from Sigma_q and from the model's own files."""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab.codecs.shared.metric import of_outputs, over_lags
from kvlab.core.errors import ModelError
from kvlab.core.model import ModelInfo, weight_files
from kvlab.engines.hf.rotary import Rotary
from kvlab.engines.hooks import attention_layers

Angles = tuple[Tensor, Tensor]
"""cos and sin of a layer's rotary embedding at positions 0.., float32 [tokens, pairs] each; see `rotated`."""


class ErrorMetrics:
    """The metrics of every layer of one model; see `codecs.shared.metric` for what they mean.

    Parameters
    ----------
    info : ModelInfo
        The model. Its output projections are read one at a time, nothing else of its weights.
    context : int
        Tokens of a cache: lags from 0 to `context` - 1 are averaged over, or as far as a layer's window reaches.

    Attributes
    ----------
    angles : list of Angles
        By layer; layers alike share them.
    """

    def __init__(self, info: ModelInfo, context: int):
        self.info = info
        skeleton = model_skeleton(info)
        self.angles = rotary_angles(info, context)
        names = {parameter: name for name, parameter in skeleton.named_parameters()}
        self._outputs = [names[attention.o_proj.weight] for attention in attention_layers(skeleton, info)]

    def k(self, layer: int, sigma: Tensor) -> Tensor:
        """A layer's Sigma_q turned by every lag at which a query sees a key, float64 [kv_heads, head_dim, head_dim]."""
        cos, sin = (part[: self.info.windows[layer]] for part in self.angles[layer])
        return over_lags(sigma, cos, sin)

    def v(self, layer: int) -> Tensor:
        """W_o^T W_o of a layer, float64 [kv_heads, head_dim, head_dim]."""
        return of_outputs(weight_of(self.info, self._outputs[layer]), self.info.n_kv_heads, self.info.head_dim)


def model_skeleton(info: ModelInfo) -> torch.nn.Module:
    """The model without its weights."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(info.path, trust_remote_code=False, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)


def rotary_angles(info: ModelInfo, tokens: int) -> list[Angles]:
    """By layer, cos and sin of the model's rotary embedding; layers alike share them."""
    rotary = Rotary.of_config(AutoConfig.from_pretrained(info.path, trust_remote_code=False, local_files_only=True))
    found = {}
    for layer in rotary.distinct():
        cos, sin = rotary(layer, torch.arange(tokens)[None], torch.zeros(1))
        pairs = cos.shape[-1] // 2
        found[rotary.kinds[layer]] = cos[0, :, :pairs], sin[0, :, :pairs]
    return [found[kind] for kind in rotary.kinds]


def weight_of(info: ModelInfo, name: str) -> Tensor:
    """One weight as it is stored; `ModelError` when the files have none of this name."""
    for path in weight_files(info.path):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                return file.get_tensor(name)
    raise ModelError(f"{info.path} has no weight {name!r}")

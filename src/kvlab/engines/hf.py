"""Hugging Face transformers as an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from kvlab.engines.base import Engine, Tap, refuse_broken_weights
from kvlab.engines.hooks import installed, separate_projections
from kvlab.errors import ModelError
from kvlab.model import ModelInfo


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

    @torch.inference_mode()
    def score(self, ids: Sequence[int], first: int, tap: Tap | None = None) -> torch.Tensor:
        """See `Engine.score`."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        places = separate_projections(self.model, self.info, tap) if tap else []
        with installed(places):
            output = self.model(tokens, use_cache=False, logits_to_keep=len(ids) - first)
        return output.logits[0, :-1]

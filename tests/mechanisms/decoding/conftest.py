from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def model(tiny_model):
    """The tiny model in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

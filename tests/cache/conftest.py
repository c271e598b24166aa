"""The tiny model and what was fitted for it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlab.calibration import load as calibration
from kvlab.calibration.load import Calibrated
from kvlab.core.model import ModelInfo, resolve


@pytest.fixture(scope="module")
def info(tiny_params) -> ModelInfo:
    return resolve(tiny_params.model)


@pytest.fixture(scope="module")
def calibrated(tiny_fitted, info) -> Calibrated:
    return calibration.load(tiny_fitted, info.model_hash)


@pytest.fixture(scope="module")
def model(tiny_model):
    """In transformers, float32, sdpa."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()

"""What the engine computed before it was folded up: the truth that a calibration is held against."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def calib_windows(tiny_params, tiny_windows):
    """The tiny model's windows."""
    from kvlab.core.model import resolve
    from kvlab.text import corpus

    return corpus.load(tiny_windows, resolve(tiny_params.model).model_hash)


@pytest.fixture(scope="session")
def everything(hf_engine, calib_windows) -> dict:
    """``layer_{l}_{q|k|v}`` of the calibration windows' contexts, float32 [windows, heads, tokens, head_dim]."""
    import torch

    found: dict[str, list] = {}

    def keep(layer, part, x):
        found.setdefault(f"layer_{layer}_{part}", []).append(x.clone())

    for ids in calib_windows.calib[:, : calib_windows.context].tolist():
        hf_engine.score(ids, len(ids) - 2, keep)
    return {name: torch.stack(parts) for name, parts in found.items()}

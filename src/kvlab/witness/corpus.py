"""The scored tokens, read by position from the file of windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open


def window(path: Path, text: str, number: int) -> list[int]:
    """The token ids of one window of a text, as the file has them."""
    with safe_open(str(path), framework="numpy") as file:
        return [int(token) for token in file.get_slice(text)[number]]


def labels(ids: list[int], positions: list[int]) -> np.ndarray:
    """The tokens that stand at some positions."""
    return np.array([ids[place] for place in positions])

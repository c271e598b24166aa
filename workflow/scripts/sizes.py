"""How large a model is by its configuration alone, before its weights are there."""

from __future__ import annotations

import json
import os
from pathlib import Path

BASE_MB = 5000  # of a job beside the weights: programs, K and V, logits, and what is spare, as clusters kill at a limit
UNKNOWN = 500_000_000  # parameters of a model whose configuration is not here


def parameters(folder):
    """Parameters of a decoder with gated feed-forward layers; None where there is no configuration, or another one.

    Biases and norms are left out: a thousandth.
    """
    try:
        said = json.loads((Path(folder) / "config.json").read_text())
        said = said.get("text_config", said)
        width, heads, layers = said["hidden_size"], said["num_attention_heads"], said["num_hidden_layers"]
        head_dim = said.get("head_dim") or width // heads
        attention = 2 * width * head_dim * (heads + (said.get("num_key_value_heads") or heads))
        embeddings = said["vocab_size"] * width * (1 if said.get("tie_word_embeddings") else 2)
        return embeddings + layers * (attention + 3 * width * said["intermediate_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def memory_mb(number, copies):
    """MB of a job that holds a model of so many parameters so many times in float32; of a small one where None.

    Measured on a CPU: 3.9 GB with SmolLM2-135M twice, 15 GB with Qwen2.5-Coder-1.5B twice and 8 GB with it once.
    """
    return BASE_MB + copies * 4 * (number or UNKNOWN) // 1_000_000


def memory_of_this_machine():
    """MB that jobs may take here."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_000_000

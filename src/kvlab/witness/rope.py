"""Rotary embeddings by their papers: how fast each pair of dimensions turns, and how much attention is scaled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.base.decoder import Decoder


def turns(decoder: Decoder, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at positions 0.., float32 [tokens, head_dim] each."""
    speeds, scale = _speeds(decoder, tokens)
    angles = torch.arange(tokens).float()[:, None] * speeds
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def _speeds(decoder: Decoder, tokens: int) -> tuple[Tensor, float]:
    """Radians that a pair turns by each token, float32 [head_dim / 2], and the scale of cosine and sine."""
    rope, size, theta = decoder.rope, decoder.head_dim, decoder.rope["rope_theta"]
    kind, factor = rope["rope_type"], rope.get("factor", 1.0)
    if kind == "dynamic":  # bloc97 and emozilla 2023: the base grows with what is longer than the model was trained for
        longer = factor * max(tokens, decoder.max_positions) / decoder.max_positions - (factor - 1)
        theta = theta * longer ** (size / (size - 2))
    speeds = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)  # Su et al. 2021, arXiv 2104.09864
    if kind in ("linear", "proportional"):  # Chen et al. 2023, arXiv 2306.15595: positions closer together
        return speeds / factor, 1.0
    if kind == "llama3":
        return _by_wavelength(speeds, rope), 1.0
    if kind == "yarn":
        return _by_rotations(speeds, rope, size), _yarn_scale(rope)
    if kind == "longrope":
        return _by_pair(speeds, decoder, tokens)
    return speeds, 1.0


def _by_wavelength(speeds: Tensor, rope: dict) -> Tensor:
    """Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783): long waves are slowed, short ones not, a ramp between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = rope["original_max_position_embeddings"] / (2 * math.pi / speeds)  # in the length that was trained on
    share = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - share) * speeds / rope["factor"] + share * speeds


def _by_rotations(speeds: Tensor, rope: dict, size: int) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): as `_by_wavelength`, the ramp by dimension."""
    length, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def dimension(rotations: float) -> float:
        """The one that turns so often over the length that was trained on."""
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    slowed = ((torch.arange(size // 2).float() - first) / (last - first or 0.001)).clamp(0, 1)
    return speeds / rope["factor"] * slowed + speeds * (1 - slowed)


def _yarn_scale(rope: dict) -> float:
    """Of YaRN's cosine and sine: the square root of its temperature."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def _by_pair(speeds: Tensor, decoder: Decoder, tokens: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each pair has a factor, others beyond the length trained on."""
    rope, trained = decoder.rope, decoder.rope["original_max_position_embeddings"]
    factor = rope.get("factor") or decoder.max_positions / trained
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    pairs = rope["long_factor" if tokens > trained else "short_factor"]
    return speeds / torch.tensor(pairs, dtype=torch.float32), scale

"""Coders of every codec of the ladder for one small layout, calibrated by planted streams."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from codec import ladder_making
from kvlab.cache.rope_turn import RopeTurn, apply_rope
from kvlab.calibration.load import Calibrated
from kvlab.core.recipe import Recipe
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot.payload import CodedChunks

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=16)
CHUNKS = 3
LENGTH = CHUNKS * GEOMETRY.chunk_tokens


def recipe(name: str, condition: str = "plain", bits: int = 4) -> Recipe:
    """The same codec for K and for V; only K is whitened."""
    changes = ladder_making.CONDITIONS[condition]
    k, v = (
        type(plain).model_validate(plain.model_dump() | {key: value for key, value in changes.items() if key in keys})
        for plain, keys in (
            (ladder_making.RECIPES[name](bits), changes),
            (ladder_making.RECIPES[name](bits), ["center"]),
        )
    )
    return Recipe(k=k, v=v)


@cache
def calibrated(calibration_hash: str = "c" * 16) -> Calibrated:
    """One planted calibration, the same for all layers and both streams."""
    fitted = ladder_making.calibration(GEOMETRY.kv_heads, GEOMETRY.head_dim)
    (whitener,), (components,) = fitted.whiteners.values(), fitted.components.values()
    layers = range(GEOMETRY.layers)
    own = {
        codec: ladder_making.own_calibration(codec, GEOMETRY.kv_heads, GEOMETRY.head_dim).own[ladder_making.LAYER]
        for codec in ("kvquant",)
    }
    return Calibrated(
        whiteners=dict.fromkeys(layers, whitener),
        tables={},
        origin="hf",
        corpus_hash="a" * 16,
        sigma_hash="b" * 16,
        calibration_hash=calibration_hash,
        components={stream: dict.fromkeys(layers, components) for stream in ("k", "v")},
        rotated=dict.fromkeys(layers, whitener),
        own={(stream, codec): dict.fromkeys(layers, fit) for stream in ("k", "v") for codec, fit in own.items()},
    )


def turn(tokens: int = LENGTH) -> RopeTurn:
    """A rotary embedding at positions 0, 1, .."""
    half = GEOMETRY.head_dim // 2
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return RopeTurn(angles.cos().repeat(1, 2), angles.sin().repeat(1, 2))


def coder(name: str, condition: str = "plain", bits: int = 4, **changes) -> CodedChunks:
    settings = {"calibration": calibrated(), "placement": "pre_rope", "turns": [turn()] * GEOMETRY.layers}
    return CodedChunks(GEOMETRY, recipe(name, condition, bits), **settings | changes)


def payload(number: int, geometry: Geometry = GEOMETRY) -> Tensor:
    """Planted K, turned, and V."""
    first, size = number * geometry.chunk_tokens, geometry.chunk_tokens
    span, found = slice(first, first + size), []
    for layer in range(geometry.layers):
        k, v = (
            ladder_making.planted(geometry.kv_heads, size, geometry.head_dim, 10 * number + layer + p) for p in (0, 5)
        )
        found += [apply_rope(k, turn().cos[span], turn().sin[span]), v]
    return torch.stack(found).view(geometry.chunk_shape).to(geometry.torch_dtype)

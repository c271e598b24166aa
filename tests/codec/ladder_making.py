"""Planted streams, calibrations that fit them, and a recipe of every codec, for the tests of all codecs."""

from collections.abc import Container
from dataclasses import replace
from functools import lru_cache

import torch

from codec import making
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.cast import CastStream
from kvlab.codecs.catalogue import UNSTORED
from kvlab.codecs.d4 import D4Stream
from kvlab.codecs.e8 import E8Stream
from kvlab.codecs.fp8 import Fp8Stream
from kvlab.codecs.ggml import GgmlStream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.kvquant import KvQuantStream
from kvlab.codecs.nf4 import Nf4Stream
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.oscar import OscarStream
from kvlab.codecs.quantized_cache import QuantizedCacheStream
from kvlab.codecs.registry import build, fit_class
from kvlab.codecs.shared import components, whitening
from kvlab.codecs.turboquant import TurboQuantStream
from kvlab.codecs.vllm_types import VllmStream
from kvlab.codecs.wush import WushStream
from kvlab.core.codec_settings import IdentityStream

BLOCK = 32
LAYER = making.SITE.layer

RECIPES = {
    "identity": lambda bits: IdentityStream(),
    "noise": lambda bits: NoiseStream(sigma=2.0**-bits, seed=0),
    "cast": lambda bits: CastStream(dtype="float16" if bits > 4 else "bfloat16"),
    "isotropic": lambda bits: IsotropicStream(of=RECIPES["block"](bits), seed=0),
    "block": lambda bits: making.recipe(bits=bits, block_size=BLOCK, skeleton="fp32"),
    "klt": lambda bits: KltStream(bits=bits, block_size=BLOCK),
    "int": lambda bits: IntStream(bits=bits, block_size=BLOCK),
    "kivi": lambda bits: KiviStream(bits=bits, axis="channel", group=16, block_size=BLOCK),
    "kivi-token": lambda bits: KiviStream(bits=bits, axis="token", block_size=BLOCK),
    "hadamard": lambda bits: HadamardStream(bits=bits, block_size=BLOCK),
    "oscar": lambda bits: OscarStream(bits=bits, clip=1.0, block_size=BLOCK),
    "fp8": lambda bits: Fp8Stream(block_size=BLOCK),
    "nf4": lambda bits: Nf4Stream(group=16, block_size=BLOCK),
    "d4": lambda bits: D4Stream(bits=bits, block_size=BLOCK),
    "e8": lambda bits: E8Stream(bits=bits, block_size=BLOCK),
    "ggml": lambda bits: GgmlStream(type="q8_0" if bits > 4 else "q4_0", block_size=BLOCK),
    "turboquant": lambda bits: TurboQuantStream(bits=bits, block_size=BLOCK),
    "vllm_types": lambda bits: VllmStream(format=f"int{8 if bits > 4 else 4}_per_token_head", block_size=BLOCK),
    "quantized_cache": lambda bits: QuantizedCacheStream(
        backend="hqq", bits=8 if bits > 4 else 4, dtype="float32", block_size=BLOCK
    ),
    "wush": lambda bits: WushStream(bits=bits, block_size=BLOCK),
    "kvquant": lambda bits: KvQuantStream(bits=bits, axis="channel", block_size=BLOCK),
    "kvquant-token": lambda bits: KvQuantStream(bits=bits, axis="token", block_size=BLOCK),
}
"""A recipe of each codec at some bits; a new codec adds its line here."""

CONDITIONS = {"plain": {}, "center": {"center": True}, "whiten": {"center": True, "whiten": True}}
CONDITIONED = ("int", "kivi", "oscar", "e8", "quantized_cache", "wush")
"""Codecs that stand for the others behind the one step that centers and whitens: a grid by token, one by channel, a
lattice, another library's, and the two that center in a way of their own."""


def known(name: str) -> list[str]:
    """The conditions that a codec's recipe has fields for."""
    fields = set(type(RECIPES[name](4)).model_fields)
    return [condition for condition, changes in CONDITIONS.items() if set(changes) <= fields]


def cases(conditioned: Container[str] = CONDITIONED) -> list[tuple[str, str]]:
    """Every codec without a condition, and some under every one that they know."""
    return [(name, condition) for name in RECIPES for condition in (known(name) if name in conditioned else ["plain"])]


def storing(conditioned: Container[str] = CONDITIONED) -> list[tuple[str, str]]:
    """Those cases whose codec writes codes."""
    return [case for case in cases(conditioned) if case[0] not in UNSTORED]


def planted(heads=2, tokens=70, dim=64, draw=0) -> torch.Tensor:
    """Gaussian rows of one planted distribution per head: a mean, a decaying spectrum, some loud channels."""
    plan = torch.Generator().manual_seed(1000 * heads + dim)
    turn = torch.linalg.qr(torch.randn(heads, dim, dim, generator=plan)).Q
    mean = torch.randn(heads, 1, dim, generator=plan)
    loud = 1 + 9 * (torch.rand(heads, 1, dim, generator=plan) > 0.95)
    white = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(draw))
    return ((white * torch.logspace(0, -1, dim)) @ turn + mean) * loud


@lru_cache(maxsize=32)
def calibration(heads: int, dim: int) -> StreamCalibration:
    """A whitener and components of the planted stream, from rows that no test codes."""
    whitener = whitening.fit(making.second_moment(heads, dim), ridge=1e-3)
    rows = planted(heads, 1024, dim, draw=99).unflatten(1, (2, 512))
    metric = whitener.chol.double() @ whitener.chol.double().mT
    return StreamCalibration(whiteners={LAYER: whitener}, components={LAYER: components.fit(rows, metric)})


@lru_cache(maxsize=64)
def own_calibration(codec: str, heads: int, dim: int) -> StreamCalibration:
    """The same, with what a codec fits by itself, if it does."""
    found = calibration(heads, dim)
    if codec != "kvquant":
        return found
    rows = planted(heads, 1024, dim, draw=99).unflatten(1, (2, 512))
    return replace(found, own={LAYER: fit_class(codec).of(rows)})


@lru_cache(maxsize=256)
def codec(name: str, condition: str = "plain", bits: float = 4, heads: int = 2, dim: int = 64):
    """One codec of the table, calibrated; kept, since calibrated tables take a while."""
    return fresh(name, condition, bits, heads, dim)


def fresh(name: str, condition: str = "plain", bits: float = 4, heads: int = 2, dim: int = 64, **changes):
    """The same, newly built; `changes` replace fields that the recipe has."""
    recipe = RECIPES[name](bits)
    changes = {key: value for key, value in changes.items() if key in type(recipe).model_fields}
    recipe = type(recipe)(**{**recipe.model_dump(), **CONDITIONS[condition], **changes})
    return build(recipe, own_calibration(recipe.codec, heads, dim))

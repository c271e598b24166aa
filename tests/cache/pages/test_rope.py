"""K turned back by vLLM's own table, and what cannot be turned back refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvlab import recipe
from kvlab.cache.pages.rope import MeanByPosition, Rotation, Unturned, rotation_of
from kvlab.cache.pages.worker import turn_of
from kvlab.core.errors import CapabilityError
from refusals import refused

DIM, POSITIONS = 16, 128


class Rotary(nn.Module):
    """As vLLM's module: a table of cosines and sines, K turned in place by halves, or by pairs."""

    def __init__(self, dtype=torch.float32, scale=1.0, by_pairs=False, turned=DIM):
        super().__init__()
        angle = torch.arange(POSITIONS)[:, None] / 100 ** (torch.arange(0, turned, 2) / turned)
        self.cos_sin_cache = (torch.cat((angle.cos(), angle.sin()), dim=1) * scale).to(dtype)
        self.by_pairs = by_pairs

    def forward(self, positions, q, k):
        cos, sin = self.cos_sin_cache[positions].chunk(2, dim=1)
        a, b = (k[:, ::2], k[:, 1::2]) if self.by_pairs else k.chunk(2, dim=1)
        parts = (a * cos - b * sin, b * cos + a * sin)
        return q, torch.stack(parts, dim=2).flatten(1) if self.by_pairs else torch.cat(parts, dim=1)


def attention(rotary) -> SimpleNamespace:
    return SimpleNamespace(rotary_emb=rotary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1.3], ids=["plain", "attention-scaling"])
def test_what_was_turned_is_turned_back(dtype, scale):
    rotary = Rotary(dtype, scale)
    rotation, positions = rotation_of(attention(rotary), DIM), torch.tensor([3, 99, 0, 17, 3])
    k = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
    theirs = torch.stack([rotary(positions, head, head)[1] for head in k.to(dtype)])
    close = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(rotation.undo(theirs, positions), k, atol=close, rtol=close)
    torch.testing.assert_close(rotation.redo(rotation.undo(k, positions), positions), k, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (recipe("klt", 2), Rotation),
        (recipe("klt", 2, rotary="after"), MeanByPosition),
        (recipe("hadamard", 4, rotary="after"), Unturned),
    ],
)
def test_what_stands_between_attention_and_what_is_coded(recipe, kind):
    k = SimpleNamespace(plan=SimpleNamespace(decoding=SimpleNamespace(mean=torch.ones(2, DIM))))
    known = {}
    rotary = attention(Rotary())
    found = [turn_of(rotary, recipe, DIM, k, known) for _ in range(2)]
    assert [type(one) for one in found] == [kind, kind]
    assert len(known) == (kind is not Unturned)


@pytest.mark.parametrize(
    ("rotary", "code", "data"),
    [
        (None, "unknown-rope", "none"),
        (Rotary(turned=DIM // 2), "unknown-rope", [128, 8]),
        (Rotary(by_pairs=True), "rope-convention", "Rotary"),
        (Rotary(scale=0.0), "lossy-rope", ""),
    ],
)
def test_what_cannot_be_turned_back_is_refused(rotary, code, data):
    with refused(CapabilityError, f"capability.{code}", data):
        rotation_of(attention(rotary), DIM)

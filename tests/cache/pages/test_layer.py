"""The pages of one layer: what is written is what is read, compiled or not."""

from __future__ import annotations

import pytest
import torch

from codec import ladder_making
from codec.ladder_making import LAYER, planted
from kvlab.base.errors import CodecNotActive
from kvlab.base.recipe import HadamardStream, KltStream
from kvlab.cache.pages import layer
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.rotary import Rotation, Unturned
from kvlab.cache.pages.rows import rows_of
from kvlab.codec.base import Site
from kvlab.codec.registry import build

HEADS, DIM, BLOCK = 2, 32, 4


def layer_pages() -> LayerPages:
    codec = build(HadamardStream(bits=4))
    return LayerPages(0, *(rows_of(codec, Site(0, 0, stream), HEADS, DIM) for stream in "kv"), Unturned())


def some(count: int, seed: int) -> torch.Tensor:
    return torch.randn(HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))


def test_what_is_written_is_read_from_its_slots():
    own, codec, slots = layer_pages(), build(HadamardStream(bits=4)), torch.tensor([9, 2, 3])
    pages = torch.zeros(3, 1, BLOCK, own.bytes, dtype=torch.uint8)
    k, v, positions = some(3, 0), some(3, 1), torch.arange(3)
    own.write(k, v, pages, slots, positions)
    got = own.read(pages, slots.flip(0), positions)
    for found, x, stream in zip(got[:2], (k, v), "kv", strict=True):
        assert torch.equal(found.flip(1), codec.decode(codec.encode(x, Site(0, 0, stream))))
    untouched = [slot for slot in range(12) if slot not in slots]
    assert not pages.view(12, -1)[untouched].any() and (own.written, own.read_back) == (3, 3)


@pytest.mark.parametrize("shape", [(3, 1, BLOCK, 7), (3, HEADS, BLOCK, 40)])
def test_pages_of_another_size_are_not_written(shape):
    own = layer_pages()
    with pytest.raises(CodecNotActive, match=f"a token takes {own.bytes} bytes"):
        own.write(some(1, 0), some(1, 1), torch.zeros(shape, dtype=torch.uint8), torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize("few", [True, False], ids=["few-queries", "many"])
def test_without_numba_the_same_is_read(monkeypatch, few):
    """`klt` before the rotary embedding: compiled, and as torch alone does it where numba is not installed."""
    heads, dim = 3, 64
    codec = build(KltStream(bits=3, block_size=64), ladder_making.calibration(heads, dim))
    rows = [rows_of(codec, Site(0, LAYER, stream), heads, dim) for stream in "kv"]
    angle = torch.arange(60)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
    rotation = Rotation(torch.cat((angle.cos(), angle.sin()), dim=1))
    compiled = LayerPages(LAYER, *rows, rotation)
    monkeypatch.setattr(layer, "compiled", lambda: False)
    plain = LayerPages(LAYER, *rows, rotation)
    assert compiled.quick != plain.quick == (None, None)
    k, v, positions = planted(heads, 50, dim, 0), planted(heads, 50, dim, 1), torch.arange(3, 53)
    k[:, 7] *= 50
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:50]
    pages = torch.zeros(20, 1, BLOCK, plain.bytes, dtype=torch.uint8)
    plain.write(k, v, pages, slots, positions)
    weights = torch.rand(heads, 2, 5, 50).softmax(-1)
    due, found = plain.read(pages, slots, positions, few), compiled.read(pages, slots, positions, few)
    assert (due.finish, found.finish is not None) == (None, few)
    torch.testing.assert_close(found.k, due.k, atol=1e-3, rtol=1e-4)
    summed = weights @ found.v[:, None].expand(heads, -1, -1, -1) if found.finish else weights @ found.v[:, None]
    torch.testing.assert_close(
        found.finish(summed) if found.finish else summed, weights @ due.v[:, None], atol=1e-4, rtol=1e-4
    )

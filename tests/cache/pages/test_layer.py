"""The pages of one layer: what is written is what is read, compiled or not."""

from __future__ import annotations

import pytest
import torch

from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.rope import Unturned
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.codecs.base import Site
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.registry import build
from kvlab.core.errors import CodecNotActive
from refusals import refused

HEADS, DIM, BLOCK = 2, 32, 4


def layer_pages() -> LayerPages:
    codec = build(HadamardStream(bits=4))
    return LayerPages(0, *(rows_of(codec, Site(0, 0, stream), HEADS, DIM) for stream in "kv"), Unturned())


def some(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def test_what_is_written_is_read_from_its_slots():
    own, codec, slots = layer_pages(), build(HadamardStream(bits=4)), torch.tensor([9, 2, 3])
    pages = torch.zeros(3, 1, BLOCK, own.bytes, dtype=torch.uint8)
    k, v, positions = some(3, 0), some(3, 1), torch.arange(3)
    own.write(k, v, pages, slots, positions)
    got = own.read(pages, slots.flip(0), positions)
    for found, x, stream in zip(got[:2], (k, v), "kv", strict=True):
        assert torch.equal(found.flip(1), codec.decode(codec.encode(x.transpose(0, 1), Site(0, 0, stream))))
    untouched = [slot for slot in range(12) if slot not in slots]
    assert not pages.view(12, -1)[untouched].any() and (own.written, own.read_back) == (3, 3)


@pytest.mark.parametrize("shape", [(3, 1, BLOCK, 7), (3, HEADS, BLOCK, 40)])
def test_pages_of_another_size_are_not_written(shape):
    own = layer_pages()
    with refused(CodecNotActive, "not-active.page-shape", f"{own.bytes} bytes", list(shape)):
        own.write(some(1, 0), some(1, 1), torch.zeros(shape, dtype=torch.uint8), torch.tensor([0]), torch.tensor([0]))

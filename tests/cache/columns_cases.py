"""Compiled loops over blocks of `klt`: scores, sums and bytes are those of the codec itself; see `test_columns.py`."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec import ladder_making
from codec.ladder_making import LAYER, planted
from kvlab.cache.hf.attention_view import SCRATCH, BlockReader
from kvlab.cache.hf.coder import StreamCoder
from kvlab.cache.hf.klt_columns import KltColumns
from kvlab.cache.hf.sequences import Straight, TokenRow
from kvlab.cache.rope_turn import RopeTurn
from kvlab.codecs.base import Site
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.klt.writing_numba import QuickRows
from kvlab.codecs.registry import build
from kvlab.core.errors import NonFinite

DIM = 64
BITS = [{"bits": 4}, {"bits": 2}, {"bits": 0.5}, {"bits": 3, "escape": False}]


def hard(heads, tokens):
    """Tokens of which some fit no table, in every way."""
    x = planted(heads, tokens, DIM, 1)
    x[:, ::7] *= 30
    x[1, ::11, 7] += 1e4
    x[:, ::13] = 1e3 * torch.randn(x[:, ::13].shape, generator=torch.Generator().manual_seed(1))
    return x


@pytest.mark.parametrize("heads", [3, 6], ids=["one-group", "two-groups"])
@pytest.mark.parametrize("changes", BITS, ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_blocks_give_the_scores_and_sums_of_what_the_codec_decodes(heads, changes, turned):
    stream = KltStream(block_size=64, **changes)
    coder = StreamCoder(build(stream, ladder_making.calibration(heads, DIM)), stream, Site(0, LAYER, "k"), heads, DIM)
    angle = torch.arange(SCRATCH + 300)[:, None] / 100 ** (torch.arange(0, DIM, 2) / DIM)
    turn = RopeTurn(*(f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))) if turned else Straight()
    x = hard(heads, SCRATCH + 200)
    rows = [TokenRow(), TokenRow(pads=5)]
    for part in (x[:, : SCRATCH + 150], x[:, SCRATCH + 150 : -1], x[:, -1:]):  # blocks, and loose tokens twice
        rows, _ = coder.append(rows, [part, part[:, 5 if part.shape[1] > 60 else 0 :]], [turn] * 2)
    assert all(row.blocks and row.strewn == 50 for row in rows) and rows[0].length == rows[1].length
    q = torch.randn(2, heads, 5, DIM)
    for first in (0, 40, SCRATCH):
        weights = torch.rand(2, heads, 5, rows[0].length).softmax(-1)
        weights[1, ..., :5] = 0
        due, found = torch.zeros(2, heads, 5, rows[0].length), torch.zeros(2, heads, 5, rows[0].length)
        sums = torch.zeros(2, heads, 5, DIM), torch.zeros(2, heads, 5, DIM)
        for reader, scores, total in ((BlockReader(coder), due, sums[0]), (KltColumns(coder), found, sums[1])):
            reader.scores(rows, [turn] * 2, q, first, scores)
            reader.mixed(rows, weights, first, total)
        known = max(first, 5)
        assert (found - due)[..., known:].abs().max() <= 5e-6 * due.abs().max()
        assert (sums[0] - sums[1]).abs().max() <= 5e-6 * x.abs().max()


@pytest.mark.parametrize("heads", [3, 6], ids=["one-group", "two-groups"])
@pytest.mark.parametrize("changes", BITS, ids=str)
def test_a_few_tokens_are_written_as_torch_writes_them(heads, changes):
    codec = build(KltStream(block_size=64, **changes), ladder_making.calibration(heads, DIM))
    rows = KltRows(codec, Site(0, LAYER, "k"), heads, DIM)
    quick, x = QuickRows(rows), torch.cat((hard(heads, 200), planted(heads, 200, DIM, 2)), dim=1)
    for part in x.split([1, 2, 7, 30, 60, 100, 200], dim=1):
        assert torch.equal(quick.encode(part), rows.encode(part))


@given(st.integers(0, 2**31), st.floats(-6, 6), st.integers(1, 40), st.sampled_from([1, 2, 4]))
@settings(max_examples=25)
def test_whatever_tokens_are_they_are_written_as_torch_writes_them(seed, size, tokens, bits):
    """But for one that lies within the rounding of a sum of the edge of two cells, of which there is hardly any."""
    rows = KltRows(codec_of(bits), Site(0, LAYER, "k"), 3, DIM)
    source = torch.Generator().manual_seed(seed)
    x = planted(3, tokens, DIM, seed % 1000) * 10 ** (size * torch.rand(1, tokens, 1, generator=source))
    x += (torch.rand(x.shape, generator=source) > 0.99) * 10**size
    assert (QuickRows(rows).encode(x) != rows.encode(x)).any(1).sum() <= 1


@cache
def codec_of(bits):
    return build(KltStream(bits=bits, block_size=64), ladder_making.calibration(3, DIM))


def test_what_is_not_finite_is_refused_before_anything_is_written():
    rows = QuickRows(KltRows(codec_of(2), Site(0, LAYER, "k"), 3, DIM))
    x, out = planted(3, 5, DIM, 0), torch.full((5, rows.bytes), 7, dtype=torch.uint8)
    x[1, 3, 2] = torch.inf
    with pytest.raises(NonFinite):
        rows.write(x, out, np.arange(5), 0)
    assert (out == 7).all()

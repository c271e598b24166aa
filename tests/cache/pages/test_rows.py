"""A token as a row of bytes: the codec's own codes, whoever is coded beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec import ladder_making
from codec.ladder_making import LAYER, planted
from kvlab.cache.pages.token_bytes import KltRows, LaidOut, rows_of
from kvlab.codecs.base import Site
from kvlab.codecs.klt import KltStream
from kvlab.codecs.registry import build
from kvlab.core.errors import CapabilityError
from refusals import refused

HEADS, DIM = 3, 64
SITE = Site(0, LAYER, "k")
PER_TOKEN = ["klt", "hadamard", "int", "nf4", "kivi-token", "oscar", "d4", "e8", "identity"]


def made(name: str, bits: int = 4):
    recipe = ladder_making.RECIPES[name](bits)
    return build(recipe, ladder_making.calibration(HEADS, DIM))


def tokens(count: int, draw: int = 0) -> torch.Tensor:
    """Planted rows; some far out, some large, one near nothing that was calibrated."""
    x = planted(HEADS, count, DIM, draw)
    x[:, 3 % count] *= 40
    x[1, 5 % count, 7] += 1e4
    x[:, 8 % count] = 1e3 * torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(draw))
    return x


@pytest.mark.parametrize("name", PER_TOKEN)
def test_rows_decode_bit_for_bit_as_the_codec_does(name):
    codec, x = made(name), tokens(70)
    rows = rows_of(codec, SITE, HEADS, DIM)
    coded = rows.encode(x)
    assert coded.shape == (70, rows.bytes) and coded.dtype == torch.uint8
    assert torch.equal(rows.decode(coded), codec.decode(codec.encode(x, SITE)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(["klt", "hadamard"]))
def test_a_row_depends_on_no_other(cuts, draw, name):
    """Coded in any pieces, decoded in any order."""
    rows, x = rows_of(made(name), SITE, HEADS, DIM), tokens(sum(cuts), draw)
    whole = rows.encode(x)
    assert torch.equal(torch.cat([rows.encode(part) for part in x.split(cuts, dim=1)]), whole)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(draw))
    assert torch.equal(rows.decode(whole[order]), rows.decode(whole)[:, order])


@pytest.mark.parametrize("bits", [2, 4])
def test_a_row_takes_hardly_more_than_the_recipe_says(bits):
    rows = rows_of(made("klt", bits), SITE, HEADS, DIM)
    assert isinstance(rows, KltRows)
    assert rows.bytes <= bits * HEADS * DIM / 8 + 3


def test_every_way_of_an_escape_fits_the_row():
    """The trial tokens are of all kinds that `klt` knows, or the tests above show less than they seem to."""
    codec = build(KltStream(bits=4, block_size=16), ladder_making.calibration(HEADS, DIM))
    plan = codec.plan(LAYER, (HEADS, 1, DIM), torch.device("cpu"))
    symbols, escaped = plan.analyse(tokens(70), SITE)
    group, token = symbols[plan.rows :].nonzero().unbind(1)
    said = plan.tails.said(group, plan.vectors(symbols)[group, :, token])
    counts, numbers = said.count, said.number
    assert escaped and (counts > 0).any() and ((counts == 0) & (numbers == 15)).any()
    assert ((counts == 0) & (numbers != 15)).any()


@pytest.mark.parametrize("name", ["kivi", "block"])
def test_codecs_that_code_tokens_together_have_no_rows(name):
    with refused(CapabilityError, "capability.no-rows", f"'{name}'", f"layer {LAYER}"):
        LaidOut(made(name), SITE, HEADS, DIM)

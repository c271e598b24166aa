"""The controls beside noise: a dtype's rounding, and a codec's error turned in a random direction."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec import ladder_making, making
from kvlab.codecs.base import Site
from kvlab.codecs.cast import CastStream
from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.registry import build
from kvlab.core.errors import CalibrationMismatch, NonFinite
from kvlab.core.recipe import Recipe, digest
from refusals import refused, refused_in_one_line
from tiers import examples

SITE = making.SITE
KLT = KltStream(bits=2, block_size=64)
BLOCK = making.recipe(bits=2, block_size=128)
SEEDS_AND_SITES = [(3, SITE), (4, SITE), (3, Site(1, 1, "k")), (3, Site(0, 2, "k")), (3, Site(0, 1, "v"))]


def errors(of, x, seed=3, site=SITE, calibration=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The error of a codec and that of its control, float64."""
    wide = x.double()
    decoded = [
        codec.decode(codec.encode(x, site)).double()
        for codec in (build(of, calibration), build(IsotropicStream(of=of, seed=seed), calibration))
    ]
    return decoded[0] - wide, decoded[1] - wide


def unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


# -- cast


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_cast_is_the_rounding_of_torch_and_its_own_fixed_point(name):
    x, dtype = making.stream(tokens=50), getattr(torch, name)
    codec = build(CastStream(dtype=name))
    encoded = codec.encode(x, SITE)
    decoded = codec.decode(encoded)
    assert decoded.dtype == torch.float32 and torch.equal(decoded, x.to(dtype).float())
    assert torch.equal(codec.decode(codec.encode(decoded, SITE)), decoded)
    assert 0 < (decoded - x).abs().max() <= torch.finfo(dtype).eps / 2 * x.abs().max()
    assert not encoded.packed and encoded.stats.n_coefficients == 0
    place, values = codec.decode_block(encoded, 0)
    assert torch.equal(decoded[place], values)


def test_half_way_between_two_numbers_goes_to_the_even_one():
    step = 2.0**-7  # of bfloat16 above 1
    x = torch.tensor([[[1 + step / 2, 1 + 3 * step / 2, 1 + 0.51 * step]]])
    codec = build(CastStream())
    assert codec.decode(codec.encode(x, SITE)).flatten().tolist() == [1.0, 1 + 2 * step, 1 + step]


@pytest.mark.parametrize("name, largest, beyond", [("float16", 65519.0, 65520.0), ("bfloat16", 3.39e38, 3.4e38)])
def test_a_value_beyond_the_dtype_is_refused_in_one_line(name, largest, beyond):
    codec = build(CastStream(dtype=name))
    assert codec.decode(codec.encode(torch.full((1, 3, 4), -largest), SITE)).isfinite().all()
    with refused_in_one_line(NonFinite, "non-finite.too-large", "layer 1 k", name, "window 0"):
        codec.encode(torch.full((1, 3, 4), -beyond), SITE)


# -- isotropic


@pytest.mark.parametrize("of", [BLOCK, KLT, making.recipe(whiten=True, layout="mixed_heads")], ids=lambda of: of.codec)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_of_every_head_keeps_the_norm_of_its_error(of, dtype):
    x = ladder_making.planted(heads=3, tokens=128).to(dtype)
    before, after = (error.norm(dim=-1) for error in errors(of, x, calibration=ladder_making.calibration(3, 64)))
    assert before.min() > 0 and before.max() > 2 * before.min()
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0)


def test_the_direction_knows_nothing_of_the_codecs_error():
    """Over 2000 tokens the mean cosine is 0 and its variance that of directions drawn uniformly, 1 / dim."""
    x = making.stream(tokens=1000, dim=32)
    before, after = (unit(error) for error in errors(BLOCK, x))
    cosine = (before * after).sum(-1).flatten()
    n, dim = cosine.numel(), x.shape[-1]
    assert abs(cosine.mean()) < 5 / (n * dim) ** 0.5
    assert cosine.square().mean().item() == pytest.approx(1 / dim, rel=5 * (2 / n) ** 0.5)


def test_directions_are_isotropic_where_those_of_the_codec_are_not():
    x = making.stream(heads=4, tokens=1000, dim=16)
    coarse = making.recipe(bits=1, variance_ratio=0.6, block_size=128)  # loses whole directions
    eigenvalues = []
    for error in errors(coarse, x):
        rows = unit(error)
        found = torch.linalg.eigvalsh(rows.mT @ rows / rows.shape[1])  # of each head
        eigenvalues.append(16 * found)
    codec, control = eigenvalues
    edge = (16 / 1000) ** 0.5  # white rows: between (1 - edge)**2 and (1 + edge)**2
    assert control.min() > (1 - 1.3 * edge) ** 2 and control.max() < (1 + 1.3 * edge) ** 2
    assert codec.max() > 2


def test_it_is_the_same_every_time_and_another_at_every_site_and_seed():
    x = making.stream(tokens=256)
    draws = [errors(BLOCK, x, seed, site)[1] for seed, site in SEEDS_AND_SITES]
    again = [errors(BLOCK, x, seed, site)[1] for seed, site in SEEDS_AND_SITES]
    assert all(map(torch.equal, draws, again))
    for i, one in enumerate(draws):
        for other in draws[i + 1 :]:
            assert abs((unit(one) * unit(other)).sum(-1).mean()) < 5 / one.numel() ** 0.5


def test_two_codecs_are_turned_the_same_way():
    x = making.stream(tokens=64)
    coarse, fine = (errors(making.recipe(bits=bits), x)[1] for bits in (1, 4))
    assert coarse.square().sum() > 10 * fine.square().sum()
    torch.testing.assert_close(unit(coarse), unit(fine), rtol=0, atol=1e-4)


def test_where_the_codec_makes_no_error_nothing_is_added():
    x = making.stream(tokens=40)
    x[:, 20:] = 0
    exact = making.recipe(bits=2, block_size=20, skeleton="fp32")
    before, after = errors(exact, x)
    assert (before[:, :20] != 0).any(-1).all() and (before[:, 20:] == 0).all()
    assert (after[:, :20] != 0).any(-1).all() and (after[:, 20:] == 0).all()


@given(exponent=st.integers(-8, 8), seed=st.integers(0, 2**32))
@examples(30)
def test_the_norm_differs_by_the_rounding_of_the_sum_and_by_nothing_else(exponent, seed):
    x = making.stream(heads=1, tokens=30, dim=16, seed=seed) * 10.0**exponent
    before, after = errors(making.recipe(block_size=30, skeleton="fp32"), x)
    before, after, noised = (rows.norm(dim=-1) for rows in (before, after, x.double() + after))
    assert ((after - before).abs() <= 2.0**-24 * noised + 1e-12 * before).all()  # the sum's rounding to float32


def test_it_reports_the_ranks_and_outliers_of_its_codec():
    x = making.stream()
    of = making.recipe(variance_ratio=0.9, outlier_threshold=2.0)
    encoded = build(IsotropicStream(of=of, seed=0)).encode(x, SITE)
    assert encoded.stats == build(of).encode(x, SITE).stats
    assert encoded.stats.d_eff and encoded.stats.n_outliers and not encoded.packed


def test_its_codec_gets_the_calibration():
    with refused(CalibrationMismatch, "calibration.no-codebook", "fitted"):
        build(IsotropicStream(of=making.recipe(codebook="fitted"), seed=0))
    with refused(CalibrationMismatch, "calibration.missing", "layer 1"):
        build(IsotropicStream(of=making.recipe(whiten=True), seed=0)).encode(making.stream(), SITE)


@pytest.mark.parametrize("recipe", [CastStream(), IsotropicStream(of=BLOCK, seed=0)], ids=lambda recipe: recipe.codec)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_not_a_number_is_refused(recipe, bad):
    x = making.stream(tokens=20)
    x[0, 3, 5] = bad
    with refused(NonFinite, None, "layer 1 k"):
        build(recipe).encode(x, SITE)


def test_noise_that_leaves_float32_is_refused():
    codec = build(IsotropicStream(of=making.recipe(skeleton="fp32"), seed=0))
    codec.inner = SimpleNamespace(encode=codec.inner.encode, decode=lambda coded: torch.zeros(coded.shape))  # loses all
    x = torch.full((1, 128, 8), 3e38)
    with refused(NonFinite, "non-finite.too-large", "layer 1 k", 3e38):
        codec.encode(x, SITE)


@pytest.mark.parametrize("of", [BLOCK, KLT], ids=lambda of: of.codec)
def test_a_nested_recipe_is_read_as_it_was_written_and_has_its_own_id(of):
    recipe = Recipe(k=IsotropicStream(of=of, seed=1), v=CastStream(dtype="float16"))
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    others = [of, IsotropicStream(of=of, seed=2), IsotropicStream(of=of.model_copy(update={"bits": 3}), seed=1)]
    assert len({digest(stream) for stream in (recipe.k, *others)}) == 4

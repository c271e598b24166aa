"""The codecs of other people at their published settings, and tokens kept at the ends of a cache."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec import ladder_making, making
from kvlab.cli.checked import recipes_of
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.catalogue import LADDERED, PIPELINED, PUBLISHED, rates
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.kvquant import KvQuantStream
from kvlab.codecs.kvquant import codec as kvquant
from kvlab.codecs.recipes import named_recipe, stream_recipe
from kvlab.codecs.registry import build
from kvlab.codecs.shared import quantizer
from kvlab.codecs.shared.ended_codec import EndedCodec
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.codecs.turboquant import TurboQuantStream
from kvlab.core.errors import CalibrationMismatch, CapabilityError, ParamsError, StreamError, UnknownName
from kvlab.core.recipe import Cell, Recipe, canonical, digest
from refusals import refused
from tiers import examples

SITE = making.SITE
IDS = {  # of recipes as they were before there were ends, a place after the rotary embedding and a second metric
    ("klt", 2): "c99cadba3e43",
    ("kivi", 2): "e5d960d5c18b",
    ("hadamard+center+whiten", 2): "9319b3c9ad32",
    ("oscar", 2): "b9a0534eb855",
    ("fp8", None): "c1db74106cad",
}


def planted(tokens, heads=2, dim=64, draw=0):
    return ladder_making.planted(heads, tokens, dim, draw)


# --- what a recipe says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, bits", IDS)
def test_recipes_that_were_there_before_keep_their_ids(name, bits):
    assert named_recipe(name, bits).recipe_id == IDS[name, bits]


def test_where_k_is_coded_is_a_setting_of_any_codec_but_a_published_one():
    before, after = named_recipe("hadamard", 2, recent=128), named_recipe("hadamard", 2, rotary="after", recent=128)
    assert named_recipe("hadamard", 2, rotary="before", recent=128) == before
    assert (after.k, after.v, after.placement) == (before.k, before.v, "post_rope")
    served, whole = named_recipe("klt", 2, rotary="after"), named_recipe("klt", 2, rotary="after", escape=True)
    assert (served.k.escape, served.v.escape, whole.k) == (False, False, named_recipe("klt", 2).k)
    assert named_recipe("kivi-paper", 2, rotary="after") == named_recipe("kivi-paper", 2)
    with refused(ParamsError, "params.rotary-as-published", "kivi-paper", "after"):
        named_recipe("kivi-paper", 2, rotary="before")
    with refused(UnknownName, None, "aftr", "did you mean 'after'"):
        named_recipe("klt", 2, rotary="aftr")


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if not one.fixed])
def test_a_published_recipe_is_json_and_back_and_asked_for_by_its_name_everywhere(name, tiny_params):
    recipe = named_recipe(name, 2, 3)
    assert Recipe.model_validate_json(canonical(recipe)) == recipe
    assert (recipe.k.bits, recipe.v.bits) == (2, 3)
    assert named_recipe(name, 2, params=tiny_params) == named_recipe(name, 2)
    assert name not in LADDERED
    with refused(ParamsError, "params.not-conditionable", name):
        named_recipe(f"{name}+center", 2, params=tiny_params)


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if one.fixed])
def test_a_stored_format_has_one_recipe_whose_bits_are_its_own(name, tiny_params):
    recipe = named_recipe(name)
    assert Recipe.model_validate_json(canonical(recipe)) == recipe == named_recipe(name, params=tiny_params)
    assert rates(name, (2, 4), (1.0,)) == (None,) and [one.label for one in recipes_of(name, [2, 4])] == [name]
    assert name not in LADDERED and recipe.rotary == "after"  # engines cache K as attention reads it
    for bits in ({"bits": 4}, {"v_bits": 4}):
        with refused(ParamsError, "params.no-bits", name):
            named_recipe(name, **bits)


def test_a_wrong_setting_of_our_own_codec_is_told_what_is_allowed():
    with refused(ParamsError, None, "colour", "its settings: "):
        stream_recipe("int", colour=3)
    with refused(ParamsError, None, "bits is 1.5", "allowed: whole numbers, at least 1, at most 8"):
        stream_recipe("int", bits=1.5)
    with refused(ParamsError, None, "bits is 99", "allowed: more than 0, at most 8"):
        stream_recipe("klt", bits=99)


def test_bits_and_settings_of_a_published_codec_are_checked():
    assert named_recipe("kivi-paper", 2, group=64).k.group == 64
    with refused(ParamsError, "params.needs-bits", "kivi-paper"):
        named_recipe("kivi-paper")
    with refused(ParamsError, None, "colour", "given: 3"):
        named_recipe("kivi-paper", 2, colour=3)
    for codec in ("kvtc", "aquakv"):
        with refused(CapabilityError, "capability.one-recipe", f"{codec}-paper"):
            named_recipe(codec, 2)
    with refused(UnknownName, None, "kivi-papre", "'kivi-paper'?"):
        named_recipe("kivi-papre", 2)


def test_a_cell_stands_where_its_recipe_codes_k():
    def cell(recipe, **more):
        return Cell(
            study="ladder", label="x", engine="hf", dtype="float32", protocol="snapshot", origin="hf", stream="kv",
            layers=(0,), windows=1, recipe=recipe, **more,
        )  # fmt: skip

    after, before = named_recipe("kivi-paper", 2), named_recipe("kvquant-paper", 2)
    assert cell(after).placement == cell(after, placement="pre_rope").placement == "post_rope"
    assert cell(before).placement == "pre_rope" and cell(before, placement="post_rope").placement == "post_rope"
    assert Cell.model_validate_json(canonical(cell(after))) == cell(after)


def test_what_is_kept_is_in_the_identity():
    plain, ended = HadamardStream(bits=2), HadamardStream(bits=2, sink=1)
    assert digest(plain) != digest(ended) and "sink" not in canonical(plain)
    with pytest.raises(ValueError, match="two metrics"):
        HadamardStream(bits=2, whiten=True, weigh=True)


# --- tokens at the ends --------------------------------------------------------------------------------------------


@examples(100)
@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 4, 7]), st.integers(1, 40))
def test_the_parts_are_all_tokens_and_the_ends_come_first(sink, recent, block, tokens):
    first, middle, last = ExactTokens(sink, recent, block).split(tokens)
    assert first + middle + last == tokens and min(first, middle, last) >= 0
    assert first == min(sink, tokens) and last >= min(recent, tokens - first)
    assert not block or middle % block == 0
    assert last < recent + max(block, 1)


@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 32, 71])
@pytest.mark.parametrize("ragged", ["coded", "exact"])
def test_ends_come_back_as_they_were_and_the_rest_as_its_codec_says(tokens, ragged):
    x = planted(tokens).half().float()
    recipe = KiviStream(bits=2, axis="channel", group=8, block_size=8, sink=3, recent=4, ragged=ragged)
    codec = build(recipe)
    encoded = codec.encode(x, SITE)
    read = read_frame(frame_bytes(encoded))
    decoded = codec.decode(read)
    first, middle, _ = ExactTokens.of(recipe).split(tokens)
    assert torch.equal(decoded[:, :first], x[:, :first])
    assert torch.equal(decoded[:, first + middle :], x[:, first + middle :])
    if middle:
        alone = build(KiviStream(bits=2, axis="channel", group=8, block_size=8))
        inner = alone.decode(alone.encode(x[:, first : first + middle], SITE))
        assert torch.equal(decoded[:, first : first + middle], inner)
    seen = torch.zeros_like(x)
    for index in range(len(read.blocks)):
        place, values = codec.decode_block(read_frame(frame_bytes(encoded), only=index), index)
        assert torch.equal(values, decoded[place])
        seen[place] += 1
    assert torch.equal(seen, torch.ones_like(x))


def test_ends_count_sixteen_bits_a_value():
    x = planted(256)
    kept = build(IntStream(bits=2, sink=16, recent=48))
    bare = build(IntStream(bits=2))
    exact = 64 * x.shape[0] * x.shape[2] * 2
    apart = len(frame_bytes(bare.encode(x[:, 16:-48], SITE))) + exact
    assert 0 <= len(frame_bytes(kept.encode(x, SITE))) - apart < 64


def test_numbers_that_float16_has_not_are_kept_as_bfloat16():
    x = planted(8) * 1e30
    decoded = (codec := build(IntStream(bits=2, sink=8))).decode(codec.encode(x, SITE))
    assert torch.equal(decoded, x.bfloat16().float())
    x = planted(8).bfloat16()
    assert torch.equal(codec.decode(codec.encode(x, SITE)), x.float())


def test_forged_ends_are_refused():
    codec = build(IntStream(bits=2, sink=2, recent=2))
    encoded = codec.encode(planted(9), SITE)
    first, middle, last = encoded.blocks
    short, nan = last[0][:, :1], last[0].clone()
    nan[0, 0, 0] = float("nan")
    wrong = [(), (first,), (first, last), (first, middle), (first, middle, middle, last), ((), middle, last)]
    wrong += [(first, middle, (short,)), (first, middle, (nan,)), (first, middle, (last[0].float(),))]
    for blocks in wrong:
        with pytest.raises(StreamError):
            codec.decode(type(encoded)(**{**vars(encoded), "blocks": blocks}))


def test_a_codec_that_keeps_ends_codes_no_token_by_itself():
    assert isinstance(build(IntStream(bits=2, recent=1)), EndedCodec)
    assert not build(IntStream(bits=2, recent=1)).per_token and build(IntStream(bits=2)).per_token


# --- turboquant ----------------------------------------------------------------------------------------------------


def test_norm_correction_gives_every_vector_its_own_norm_back():
    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0))
    corrected, plain = (build(TurboQuantStream(bits=2, norm_correction=on)) for on in (True, False))
    with_it, without_it = (codec.decode(codec.encode(x, SITE)) for codec in (corrected, plain))
    torch.testing.assert_close(with_it.norm(dim=-1), x.norm(dim=-1).half().float(), rtol=1e-5, atol=1e-6)
    assert (without_it.norm(dim=-1) < x.norm(dim=-1)).float().mean() > 0.9  # a Lloyd-Max table shrinks
    torch.testing.assert_close(
        torch.nn.functional.cosine_similarity(with_it, without_it, dim=-1), torch.ones(2, 50), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turboquant_has_the_distortion_of_its_table_on_white_vectors(bits):
    x = torch.randn(1, 4000, 128, generator=torch.Generator().manual_seed(0))
    codec = build(TurboQuantStream(bits=bits, norm_correction=False))
    share = ((codec.decode(codec.encode(x, SITE)) - x).square().sum() / x.square().sum()).item()
    assert math.isclose(share, quantizer.mse(quantizer.gaussian_table(bits)), rel_tol=0.05)  # theorem 1, d = 128


# --- kvquant -------------------------------------------------------------------------------------------------------


def fit_of(codec, rows):
    return StreamCalibration(own={SITE.layer: codec.Fit.of(rows)})


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_kvquant_stores_outliers_as_they_are(axis):
    x = torch.randn(2, 400, 32, generator=torch.Generator().manual_seed(1)).half().float()
    x[0, 100, 5], x[1, 7, 31] = 500.0, -700.0
    rows = torch.randn(2, 4, 500, 32, generator=torch.Generator().manual_seed(2))
    codec = build(KvQuantStream(bits=3, axis=axis), fit_of(kvquant, rows))
    encoded = codec.encode(x, SITE)
    decoded = codec.decode(encoded)
    assert (decoded[0, 100, 5], decoded[1, 7, 31]) == (500.0, -700.0)
    ordinary = (x.abs() < 2).nonzero(as_tuple=True)
    assert (decoded - x)[ordinary].abs().max() < 0.6
    assert 0.005 < encoded.stats.n_outliers / x.numel() < (0.02 if axis == "channel" else 2 / 64 + 0.001)


def test_kvquant_scales_every_channel_of_k_by_its_own_range():
    scale = torch.logspace(-2, 2, 32)
    rows = torch.randn(2, 4, 500, 32, generator=torch.Generator().manual_seed(2)) * scale
    x = torch.randn(2, 300, 32, generator=torch.Generator().manual_seed(3)) * scale
    codec = build(KvQuantStream(bits=4, axis="channel"), fit_of(kvquant, rows))
    error = (codec.decode(codec.encode(x, SITE)) - x).square().mean((0, 1)) / scale.square()
    assert error.max() < 2 * error.min() and error.max() < 0.02


def test_kvquant_tables_follow_the_shape_of_the_values():
    rows = torch.randn(2, 4, 500, 32, generator=torch.Generator().manual_seed(2)) ** 3
    table = kvquant.table_of(tuple(kvquant.Fit.of(rows).sketch[0].tolist()), 3)
    steps = table.diff()
    assert steps.min() > 0 and steps[0] > 3 * steps[3] and steps[-1] > 3 * steps[3]  # dense where values are


def test_a_fit_for_another_model_is_refused():
    recipe, module = KvQuantStream(bits=2, axis="channel"), kvquant
    other = fit_of(module, planted(256, dim=32)[:, None])
    with refused(CalibrationMismatch, "calibration.other-shape", recipe.codec, "2 KV heads of 32", "2 of 64"):
        build(recipe, other).encode(planted(8), SITE)
    with refused(CalibrationMismatch, "calibration.missing", f"codec: {recipe.codec}"):
        build(recipe).encode(planted(8), SITE)
    good = build(recipe, fit_of(module, planted(256)[:, None]))
    with pytest.raises(StreamError):
        build(recipe, other).decode(good.encode(planted(8), SITE))


def test_published_ones_that_read_nothing_the_pipeline_lacks_may_stand_on_the_ladder():
    formats = {name for name, one in PUBLISHED.items() if one.fixed}
    assert set(PIPELINED) == {"kivi-paper", "kivi-g32", "turboquant-vllm", "wush"} | formats

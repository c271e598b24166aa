import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.making import SITE, nbytes, recipe, relative_error, second_moment, stream, tensors
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.registry import build
from kvlab.codecs.shared import quantizer, whitening
from kvlab.core.errors import CalibrationMismatch, CodecNotActive, NonFinite, StreamError
from refusals import refused
from tiers import examples

FULL_RATE = {"skeleton": "fp32", "rank_fraction": 1.0}


def round_trip(x, calibration=None, site=SITE, **changes):
    codec = build(recipe(**changes), calibration)
    encoded = codec.encode(x, site)
    return encoded, codec.decode(encoded)


@pytest.mark.parametrize("pca", ["exact", "randomized"])
def test_error_falls_with_bits_and_vanishes_at_high_rate(pca):
    x = stream()
    errors = [relative_error(x, round_trip(x, bits=b, pca=pca, **FULL_RATE)[1]) for b in range(1, 9)]
    assert all(later < 0.45 * before for before, later in pairwise(errors))
    assert errors[-1] < 1e-4


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("codebook", ["gaussian", "fitted"])
def test_tiny_threshold_is_nearly_lossless(bits, codebook):
    x = stream()
    table = StreamCalibration({}, quantizer.gaussian_table(bits).float())
    encoded, decoded = round_trip(x, table, bits=bits, codebook=codebook, outlier_threshold=1e-6, **FULL_RATE)
    assert relative_error(x, decoded) < 1e-6
    assert encoded.stats.n_outliers > 0.99 * encoded.stats.n_coefficients


def test_error_is_what_the_table_promises():
    x = torch.randn(1, 2048, 64, generator=torch.Generator().manual_seed(0))
    kept = {"block_size": 2048, "n_centres": 1, **FULL_RATE}
    for bits in (1, 2, 3, 4):
        # white rows keep all of their energy in the residual but for one centre of 64 dimensions
        error = relative_error(x, round_trip(x, bits=bits, **kept)[1])
        assert error == pytest.approx(quantizer.mse(quantizer.gaussian_table(bits)), rel=0.06)


@examples(40)
@given(
    heads=st.integers(1, 3),
    tokens=st.sampled_from([1, 2, 3, 31, 32, 33, 70]),
    dim=st.sampled_from([1, 2, 3, 17, 24, 64]),
    bits=st.integers(1, 8),
    layout=st.sampled_from(["per_head", "mixed_heads"]),
    share_basis=st.booleans(),
    pca=st.sampled_from(["exact", "randomized"]),
    ratio=st.sampled_from([1.0, 0.9]),
    threshold=st.sampled_from([None, 2.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_setting_round_trips(heads, tokens, dim, bits, layout, share_basis, pca, ratio, threshold, seed):
    x = stream(heads, tokens, dim, seed)
    made = recipe(
        bits=bits, layout=layout, share_basis=share_basis, pca=pca, variance_ratio=ratio,
        outlier_threshold=threshold, block_size=32, n_centres=5, skeleton="fp32",
    )  # fmt: skip
    encoded = build(made).encode(x, SITE)
    decoded = build(made).decode(encoded)
    assert decoded.shape == x.shape and decoded.dtype == torch.float32
    assert (decoded - x).norm() < x.norm()
    blocks = math.ceil(tokens / 32) * heads if layout == "per_head" else math.ceil(tokens * heads / 32)
    assert len(encoded.stats.d_eff) == blocks
    assert len(encoded.blocks) == blocks
    assert all(array.is_contiguous() for array in tensors(encoded))
    codec, seen = build(made), torch.zeros(heads, tokens)
    for index in range(blocks):
        place, values = codec.decode_block(encoded, index)
        assert torch.equal(decoded[place], values)
        seen[place] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("tokens", [1, 2, 511, 512, 513, 700])
def test_ragged_last_block_is_coded(tokens):
    x = stream(tokens=tokens)
    encoded, decoded = round_trip(x, bits=6, **FULL_RATE)
    assert relative_error(x, decoded) < 2e-3 if tokens > 1 else torch.allclose(x, decoded, atol=1e-6)
    assert len(encoded.stats.d_eff) == 2 * math.ceil(tokens / 512)
    half, decoded = round_trip(x, bits=6)
    assert 0 < (decoded[:, -1] - x[:, -1]).abs().max() < 2  # a tail that passed through would be exact
    assert nbytes(half) < nbytes(encoded)


def test_bytes_equal_a_formula_written_by_hand():
    # 2 heads x 700 tokens x 64 dims: two blocks of 512 and two of 188 rows, rank 32, 16 centres, 3 bits
    x = stream(tokens=700)
    encoded, _ = round_trip(x, outlier_threshold=2.0)
    per_block = 2 * 64 + 2 * 32 * 64 + 2 * 16 * 32  # mean, axes, centres
    per_vector = 0.5 + 2 + 2 + 32 * 3 / 8 + 1  # segment, gain, norm, codes, number of outliers
    outliers = encoded.stats.n_outliers * (1 + 2)
    assert encoded.stats.d_eff == (32,) * 4
    assert encoded.stats.n_coefficients == 1400 * 32
    assert 0.01 < encoded.stats.n_outliers / encoded.stats.n_coefficients < 0.06
    assert nbytes(encoded) == 4 * per_block + 1400 * per_vector + outliers


def test_shared_basis_is_stored_once():
    x = stream(tokens=1024)
    own, _ = round_trip(x, block_size=256)
    shared, decoded = round_trip(x, block_size=256, share_basis=True)
    basis = 2 * 64 + 2 * 32 * 64
    assert nbytes(own) - nbytes(shared) == (8 - 1) * basis
    assert len(shared.stats.d_eff) == 8
    assert relative_error(x, decoded) < 0.3


def test_per_head_equals_each_head_alone():
    x = stream(heads=3, tokens=300)
    settings = {"block_size": 128, "outlier_threshold": 2.0}
    together, decoded = round_trip(x, **settings)
    alone = [round_trip(head[None], **settings) for head in x]
    assert nbytes(together) == sum(nbytes(encoded) for encoded, _ in alone)
    assert (decoded - torch.cat([part for _, part in alone])).norm() < 1e-3 * decoded.norm()


def test_mixed_heads_share_blocks_of_interleaved_rows():
    x = stream(heads=2, tokens=128)
    settings = {"block_size": 64, "variance_ratio": 0.9}
    mixed, decoded = round_trip(x, layout="mixed_heads", **settings)
    interleaved = x.transpose(0, 1).reshape(1, 256, 64)  # row = token * heads + head
    as_one, expected = round_trip(interleaved, **settings)
    assert nbytes(mixed) == nbytes(as_one)
    assert torch.allclose(decoded.transpose(0, 1).reshape(1, 256, 64), expected, atol=1e-5)
    moved = x.clone()
    moved[1] += 1
    for layout, touched in (("mixed_heads", True), ("per_head", False)):
        before, after = (round_trip(y, layout=layout, **settings)[1][0] for y in (x, moved))
        assert (not torch.allclose(before, after, atol=1e-6)) is touched


def test_blocks_of_different_rank_keep_their_place():
    x = stream(heads=1, tokens=256)
    rank_two = torch.randn(128, 2, generator=torch.Generator().manual_seed(5)) @ stream(1, 2, 64, 6)[0]
    x[0, 64:192] = rank_two
    encoded, decoded = round_trip(x, block_size=64, variance_ratio=0.999, bits=6, pca="exact", skeleton="fp32")
    high, low = encoded.stats.d_eff[::3], encoded.stats.d_eff[1:3]
    assert set(low) == {2} and min(high) > 8
    assert encoded.stats.n_coefficients == sum(64 * 2 ** math.ceil(math.log2(d)) for d in encoded.stats.d_eff)
    assert relative_error(x, decoded) < 5e-3


def test_zero_residual_decodes_to_an_exact_zero_residual():
    x = torch.zeros(2, 40, 16)
    assert torch.equal(round_trip(x, bits=1, skeleton="fp32")[1], x)
    x[:, 3] = 2.0  # one direction: its centre explains it, nothing is left over
    assert torch.allclose(round_trip(x, bits=1, skeleton="fp32")[1], x, atol=1e-5)


@pytest.mark.parametrize("share_basis", [True, False])
def test_constant_rows_decode_to_the_constant(share_basis):
    x = torch.full((1, 600, 24), -3.7)
    encoded, decoded = round_trip(x, bits=1, share_basis=share_basis)
    assert torch.allclose(decoded, x, rtol=1e-3)
    assert set(encoded.stats.d_eff) == {1}


def test_repeat_is_bit_equal_whatever_was_coded_before():
    x = stream(tokens=600)
    first, once = round_trip(x, outlier_threshold=2.0)
    round_trip(stream(tokens=37, dim=17), bits=5, seed=99, pca="exact")
    torch.manual_seed(1)
    second, twice = round_trip(x, outlier_threshold=2.0)
    assert torch.equal(once, twice)
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))
    assert first.stats == second.stats


def test_decoder_reads_nothing_but_the_stored_tensors():
    x = stream(tokens=300)
    codec = build(recipe(bits=2, outlier_threshold=2.0, share_basis=True, variance_ratio=0.97))
    encoded = codec.encode(x, SITE)
    expected = codec.decode(encoded)
    copies = [array.clone() for array in tensors(encoded)]
    x.fill_(float("nan"))
    other = build(codec.recipe)
    assert torch.equal(other.decode(encoded), expected)
    assert all(torch.equal(a, b) for a, b in zip(copies, tensors(encoded), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_is_coded_as_float32(dtype):
    x = stream().to(dtype)
    assert torch.equal(round_trip(x)[1], round_trip(x.float())[1])


def test_emulated_decoder_loses_the_scale_unless_whitened():
    x = 40 * stream()
    correct = relative_error(x, round_trip(x, bits=4)[1])
    published = relative_error(x, round_trip(x, bits=4, emulate_published_decoder=True)[1])
    assert published > 10 * correct
    calibration = StreamCalibration({1: whitening.fit(second_moment(), 1e-3)}, None)
    whitened = [round_trip(x, calibration, whiten=True, emulate_published_decoder=flag)[1] for flag in (False, True)]
    assert torch.equal(*whitened)
    skipped = [
        round_trip(x, None, whiten=True, whiten_skip_layers=(1,), emulate_published_decoder=flag)[1]
        for flag in (False, True)
    ]
    assert relative_error(x, skipped[1]) > 10 * relative_error(x, skipped[0])


def test_emulated_decoder_keeps_the_norm_of_v_but_where_the_metric_dropped_it():
    x, site = 40 * stream(), Site(window=0, layer=1, stream="v")
    correct = round_trip(x, site=site, bits=4)[1]
    for metric in ("mse", "linf"):
        emulated = round_trip(x, site=site, bits=4, metric=metric, emulate_published_decoder=True)[1]
        assert torch.equal(emulated, correct)
    dropped = round_trip(x, site=site, bits=4, metric="inner_product", emulate_published_decoder=True)[1]
    assert relative_error(x, dropped) > 10 * relative_error(x, correct)


def test_metric_decides_nothing_but_whether_the_published_decoder_lost_the_norm():
    x = 40 * stream()
    whitened = {"whiten": True, "bits": 4}
    calibration = StreamCalibration({1: whitening.fit(second_moment(), 1e-3)})
    streams = {m: round_trip(x, calibration, metric=m, **whitened) for m in ("mse", "inner_product", "linf")}
    for encoded, decoded in streams.values():
        assert all(torch.equal(a, b) for a, b in zip(tensors(encoded), tensors(streams["mse"][0]), strict=True))
        assert torch.equal(decoded, streams["mse"][1])
    emulated = {m: round_trip(x, calibration, metric=m, emulate_published_decoder=True, **whitened)[1] for m in streams}
    for metric in ("mse", "linf"):
        assert torch.equal(emulated[metric], streams["mse"][1])
    assert relative_error(x, emulated["inner_product"]) > 5 * relative_error(x, streams["mse"][1])


def test_whitening_lowers_the_weighted_error():
    x, sigma = stream(), second_moment()
    whitener = whitening.fit(sigma, 1e-3)
    _, decoded = round_trip(x, StreamCalibration({1: whitener}, None), whiten=True)
    _, plain = round_trip(x)
    weighted = [whitener.whiten(y - x).double().square().sum().item() for y in (decoded, plain)]
    assert weighted[0] < 0.8 * weighted[1]


@pytest.mark.parametrize("tokens", [1, 31, 64, 70])
def test_mixed_heads_are_unwhitened_by_their_own_factor(tokens):
    x = stream(heads=3, tokens=tokens)
    calibration = StreamCalibration({1: whitening.fit(second_moment(heads=3), 1e-3)})
    changes = {"bits": 8, "block_size": 32, "n_centres": 1, "pca": "exact", "skeleton": "fp32"}
    for layout in ("per_head", "mixed_heads"):
        codec = build(recipe(layout=layout, whiten=True, **changes), calibration)
        encoded = codec.encode(x, SITE)
        decoded = codec.decode(encoded)
        assert (decoded - x).norm() < 0.05 * x.norm()
        for index in range(len(encoded.blocks)):
            place, values = codec.decode_block(encoded, index)
            assert torch.equal(decoded[place], values)


def test_half_precision_overflow_is_refused_with_its_remedy():
    x = 1e6 * stream()
    remedy = "use skeleton: fp32"
    with refused(NonFinite, "non-finite.too-large", "layer 1 k", remedy) as caught:
        round_trip(x)
    assert "whiten_skip_layers" not in str(caught.value)
    calibration = StreamCalibration({1: whitening.fit(second_moment(), 1e-3)}, None)
    with refused(NonFinite, "non-finite.too-large", remedy, "layer 1 to whiten_skip_layers"):
        round_trip(x, calibration, whiten=True)
    assert relative_error(x, round_trip(x, skeleton="fp32", bits=4)[1]) < 0.1


@pytest.mark.parametrize("pca", ["exact", "randomized"])
def test_what_whitening_takes_out_of_float32_is_refused_by_name(pca):
    x = stream()
    calibration = StreamCalibration({1: whitening.fit(1e4 * second_moment(), 1e-3)})
    with refused(NonFinite, "non-finite.too-large", "layer 1 k", "window 0", "whiten_skip_layers"):
        round_trip(x / x.abs().max() * 3e38, calibration, whiten=True, pca=pca)


def test_a_decoder_with_another_calibration_refuses_the_stream():
    calibration = StreamCalibration({1: whitening.fit(second_moment(), 1e-3)})
    encoded, _ = round_trip(stream(), calibration, whiten=True)
    for other in (None, StreamCalibration({1: whitening.fit(second_moment(heads=3), 1e-3)})):
        with refused(StreamError, "stream.other-calibration", "layer 1 k", "2 KV heads of 64"):
            build(recipe(whiten=True), other).decode(encoded)


def test_overflow_of_a_norm_alone_is_refused():
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0))
    x = 1e4 * (x - x.mean(1, keepdim=True))
    with refused(NonFinite, "non-finite.too-large", "residual norm"):
        round_trip(x, n_centres=1, rank_fraction=1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_input_names_layer_and_stream(bad):
    x = stream()
    x[1, 5, 6] = bad
    with refused(NonFinite, None, "layer 3 v"):
        round_trip(x, site=Site(0, 3, "v"))


def test_empty_input_is_refused():
    with refused(CodecNotActive, "not-active.no-values", "layer 1 k"):
        round_trip(torch.zeros(2, 0, 64))


def test_missing_calibration_is_refused_in_one_line():
    x = stream()
    for calibration in (None, StreamCalibration({2: whitening.fit(second_moment(), 1e-3)}, None)):
        with refused(CalibrationMismatch, "calibration.missing", "whitener", "layer 1"):
            round_trip(x, calibration, whiten=True)
    with refused(CalibrationMismatch, "calibration.no-codebook", "codebook"):
        round_trip(x, codebook="fitted")
    with refused(CalibrationMismatch, "calibration.other-shape", [4], "3 bits", [8]):
        round_trip(x, StreamCalibration({}, torch.arange(4.0)), codebook="fitted")
    with refused(CalibrationMismatch, "calibration.not-a-table"):
        round_trip(x, StreamCalibration({}, -torch.arange(8.0)), codebook="fitted")


@pytest.mark.parametrize("threshold", [None, 2.0])
def test_residuals_are_what_the_quantiser_sees(threshold):
    x = stream(tokens=700)
    changes = {"outlier_threshold": threshold, "variance_ratio": 0.99}
    codec = build(recipe(**changes))
    z = codec.residuals(x, SITE)
    stats = codec.encode(x, SITE).stats
    assert z.numel() == stats.n_coefficients - stats.n_outliers
    if threshold is None:  # a unit residual rotated over N coordinates has mean square 1
        assert z.square().mean().item() == pytest.approx(1, rel=1e-4)
    else:
        assert z.abs().max() <= threshold
    assert codec.residuals(torch.zeros(1, 9, 8), SITE).numel() == 0


def test_codebook_fitted_on_the_residuals_lowers_the_error():
    x = stream(tokens=1024)
    changes = {"outlier_threshold": 2.0}
    table = quantizer.fit(build(recipe(**changes)).residuals(x, SITE), 3)
    fitted, by_fitted = round_trip(x, StreamCalibration({}, table), codebook="fitted", **changes)
    gaussian, by_gaussian = round_trip(x, **changes)
    assert fitted.stats.n_outliers == gaussian.stats.n_outliers
    assert relative_error(x, by_fitted) < relative_error(x, by_gaussian)


def test_wide_vectors_with_two_byte_outliers():
    x = stream(heads=1, tokens=40, dim=300)
    encoded, decoded = round_trip(x, outlier_threshold=0.5, pca="exact", variance_ratio=0.99999, block_size=400)
    _, better = round_trip(x, outlier_threshold=1e-6, pca="exact", block_size=400, skeleton="fp32")
    assert encoded.blocks[0][5].dtype == torch.uint8  # at most 40 rows, so at most 40 components
    assert relative_error(x, better) < 1e-5 < relative_error(x, decoded)
    wide = stream(heads=1, tokens=400, dim=300)
    encoded, decoded = round_trip(wide, outlier_threshold=1e-6, pca="exact", block_size=400, skeleton="fp32")
    assert [array.dtype for array in encoded.blocks[0][5:]] == [torch.uint16, torch.uint16, torch.float16]
    assert relative_error(wide, decoded) < 1e-5


def test_exact_rank_cap_acts_on_exact_pca_only():
    x = stream()
    for pca, cap, rank in (("exact", 5, 5), ("exact", 64, 64), ("exact", 999, 64), ("randomized", 5, 32)):
        assert set(round_trip(x, pca=pca, exact_rank_cap=cap)[0].stats.d_eff) == {rank}


def forged(encoded, number, array):
    """`encoded` with one array of its first block replaced."""
    first = list(encoded.blocks[0])
    first[number] = array
    return replace(encoded, blocks=(tuple(first), *encoded.blocks[1:]))


FRAME, CENTRES, SEGMENTS, SCALARS, CODES, COUNTS, PLACES, VALUES = range(8)


def forgeries():
    """Name, number of the array, and what becomes of it."""
    yield from [
        ("no components", FRAME, lambda a: a[:1]),
        ("more components than dimensions", FRAME, lambda a: torch.cat((a, a, a))),
        ("another head_dim", FRAME, lambda a: a[:, :-1].contiguous()),
        ("another precision", FRAME, lambda a: a.float()),
        ("a line for a frame", FRAME, lambda a: a.flatten()),
        ("no centres", CENTRES, lambda a: a[:0]),
        ("a scalar for centres", CENTRES, lambda a: a[0, 0]),
        ("too many centres", CENTRES, lambda a: torch.cat((a, a))),
        ("centres of another rank", CENTRES, lambda a: a[:, :-1].contiguous()),
        ("fewer segments", SEGMENTS, lambda a: a[:-1]),
        ("a segment beyond the centres", SEGMENTS, lambda a: torch.full_like(a, 255)),
        ("gains without norms", SCALARS, lambda a: a[:1]),
        ("fewer gains", SCALARS, lambda a: a[:, :-1].contiguous()),
        ("fewer codes", CODES, lambda a: a[:-1]),
        ("longer codes", CODES, lambda a: torch.cat((a, a), 1)),
        ("more outliers than listed", COUNTS, lambda a: a + 1),
        ("fewer counts", COUNTS, lambda a: a[:-1]),
        ("an outlier beyond the vector", PLACES, lambda a: torch.full_like(a, 255)),
        ("fewer places", PLACES, lambda a: a[:-1]),
        ("a scalar for places", PLACES, lambda a: a[0]),
        ("a frame that is not finite", FRAME, lambda a: a * math.inf),
        ("centres that are not finite", CENTRES, lambda a: a * math.nan),
        ("an infinite gain", SCALARS, lambda a: torch.cat((a[:1] + math.inf, a[1:]))),
        ("a norm that is no number", SCALARS, lambda a: torch.cat((a[:1], a[1:] * math.nan))),
        ("an infinite outlier", VALUES, lambda a: a + math.inf),
        ("values of another type", VALUES, lambda a: a.float()),
        ("a scalar for values", VALUES, lambda a: a[0]),
    ]


@pytest.mark.parametrize(("number", "change"), [pytest.param(n, c, id=name) for name, n, c in forgeries()])
def test_forged_arrays_are_refused(number, change):
    codec = build(recipe(outlier_threshold=1.5, n_centres=11, block_size=32))
    encoded = codec.encode(stream(tokens=70), SITE)
    wrong = forged(encoded, number, change(encoded.blocks[0][number]))
    for decode in (codec.decode, lambda stored: codec.decode_block(stored, 0)):
        with pytest.raises(StreamError):
            decode(wrong)
    codec.decode_block(wrong, 1)  # the other blocks do not need it


def test_forged_shapes_and_lists_are_refused():
    codec = build(recipe(share_basis=True, block_size=32))
    encoded = codec.encode(stream(tokens=70), SITE)
    for wrong in (
        replace(encoded, shape=(2, 10**12, 64)),
        replace(encoded, shape=(0, 70, 64)),
        replace(encoded, shape=(2, 70, -1)),
        replace(encoded, blocks=encoded.blocks[:-1]),
        replace(encoded, blocks=((), *encoded.blocks[1:])),
        replace(encoded, blocks=(encoded.blocks[0][:-1], *encoded.blocks[1:])),
        replace(encoded, shared=()),
        replace(encoded, shared=encoded.shared * 2),
        replace(encoded, shared=(encoded.shared[0] * math.nan,)),
        replace(encoded, shared=(encoded.shared[0].flatten(),)),
        replace(encoded, shared=(encoded.shared[0].view(torch.uint16),)),
    ):
        with pytest.raises(StreamError):
            codec.decode(wrong)
    with pytest.raises(IndexError):
        codec.decode_block(encoded, len(encoded.blocks))


def test_threads_change_no_bit():
    x = stream(heads=4, tokens=600)
    codec = build(recipe(outlier_threshold=2.0, variance_ratio=0.97))
    before, runs = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        encoded = codec.encode(x, SITE)
        runs.append([*tensors(encoded), codec.decode(encoded)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

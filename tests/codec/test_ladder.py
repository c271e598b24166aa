import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec import ladder_making, making
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.d4 import D4Stream
from kvlab.codecs.d4.codec import D4Codec
from kvlab.codecs.e8 import E8Stream
from kvlab.codecs.e8.codec import E8Codec
from kvlab.codecs.fp8 import Fp8Stream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.nf4 import Nf4Stream
from kvlab.codecs.nf4 import codec as nf4
from kvlab.codecs.oscar import OscarStream
from kvlab.codecs.oscar import codec as oscar
from kvlab.codecs.registry import build
from kvlab.codecs.shared import (
    components,
    fp16,
    hadamard_pad,
    lattice,
    products,
    quantizer,
    rotation,
    uniform,
    whitening,
)
from kvlab.codecs.stream import packing
from kvlab.codecs.stream.bitstream import frame_bytes
from kvlab.core.errors import CalibrationMismatch, NonFinite, StreamError
from refusals import refused
from tiers import examples

SITE = making.SITE
LATTICES = [(4, 1), (8, 2)]  # coordinates of a word, boxes


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(recipe, x, calibration=None, site=SITE):
    codec = build(recipe, calibration)
    encoded = codec.encode(x, site)
    return encoded, codec.decode(encoded)


def error_share(x, decoded):
    return ((decoded - x).square().sum() / x.square().sum()).item()


# halves


@examples(200)
@given(st.lists(st.floats(-65000, 65000, width=32), min_size=1, max_size=9))
def test_halves_bound_from_their_side_and_are_near(numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    below, above = fp16.below(values, "x", 0).float(), fp16.above(values, "x", 0).float()
    near = (values.abs() * 2.0**-10).clamp(min=2.0**-24) * 1.01
    assert (below <= values).all() and (values - below <= near).all()
    assert (above >= values).all() and (above - values <= near).all()
    exact = values.half().float() == values
    assert torch.equal(below[exact], values[exact]) and torch.equal(above[exact], values[exact])


@pytest.mark.parametrize("recipe", [IntStream(bits=3), HadamardStream(bits=3), D4Stream(bits=3), E8Stream(bits=3)])
def test_what_float16_cannot_hold_is_refused_with_the_layer(recipe):
    with refused(NonFinite, "non-finite.too-large", "layer 1", "float16"):
        round_trip(recipe, gaussian(1, 4, 64) * 1e6)


# integer grids


@examples(60)
@given(
    n=st.integers(1, 70), group=st.integers(2, 70), bits=st.integers(1, 8), shift=st.sampled_from([0.0, 3.7, -500.0])
)
def test_no_integer_is_off_by_more_than_half_a_step(n, group, bits, shift):
    rows = gaussian(2, 3, n) + shift
    arrays = uniform.write(rows, group, bits, layer=0)
    groups = math.ceil(n / group)
    assert arrays[0].shape == (packing.packed_size(rows.numel(), bits),)
    assert arrays[1].shape == (2, 3, groups, 2)
    step = arrays[1][..., 1].float().repeat_interleave(min(group, n), dim=-1)[..., :n]
    error = (uniform.read(arrays, (2, 3, n), group, bits) - rows).abs()
    assert (error <= step / 2 * (1 + 1e-4) + 1e-6 * abs(shift)).all()
    for index, part in enumerate(rows.split(group, dim=-1)):
        reach = (part.amax(-1) - part.amin(-1) + 2.0**-9 * part.abs().amax(-1)) / (2**bits - 1)
        assert (arrays[1][..., index, 1].float() <= reach * 1.002 + 2.0**-23).all()


def test_a_grid_that_holds_nan_is_refused():
    codes, grid = uniform.write(gaussian(1, 2, 8), 4, 3, layer=0)
    grid[0, 1, 0, 0] = float("nan")
    with refused(StreamError, "stream.non-finite"):
        uniform.read((codes, grid), (1, 2, 8), 4, 3)


def test_groups_of_int_run_along_channels_and_of_kivi_along_tokens():
    x = gaussian(1, 96, 64)
    x[:, :, 7] *= 100  # a loud channel spoils its neighbours in a group of channels, not in one of tokens
    quiet = torch.arange(64) != 7
    by_token, by_channel = (
        round_trip(recipe, x)[1] for recipe in (IntStream(bits=3), KiviStream(bits=3, axis="channel", group=32))
    )
    assert torch.equal(by_token, round_trip(KiviStream(bits=3, axis="token"), x)[1])
    assert error_share(x[..., quiet], by_token[..., quiet]) > 0.5
    assert error_share(x[..., quiet], by_channel[..., quiet]) < 0.05


def test_a_ragged_group_of_tokens_has_a_grid_of_its_own():
    x = torch.cat((gaussian(1, 32, 8) * 100, gaussian(1, 3, 8) * 0.01), dim=1)
    encoded, decoded = round_trip(KiviStream(bits=4, axis="channel", group=32), x)
    assert encoded.blocks[0][1].shape == (1, 8, 2, 2)
    assert error_share(x[:, 32:], decoded[:, 32:]) < 0.02


# norm, Hadamard, Lloyd-Max


@pytest.mark.parametrize("bits, known, size", [(3, 0.0341, 400), (4, 0.0094, 528)])
def test_hadamard_reaches_the_known_error_at_the_known_bits(bits, known, size):
    x = gaussian(2, 2048, 128)
    encoded, decoded = round_trip(HadamardStream(bits=bits), x)
    assert error_share(x, decoded) == pytest.approx(known, rel=0.02)
    assert len(frame_bytes(encoded)) * 8 / (x.numel() / 128) == pytest.approx(size, rel=0.002)


def test_hadamard_does_not_mind_where_the_energy_sits():
    x = torch.zeros(1, 64, 128)
    x[0, torch.arange(64), torch.arange(64)] = 5.0
    assert error_share(x, round_trip(HadamardStream(bits=4), x)[1]) < 0.05


@pytest.mark.parametrize("center", [False, True])
def test_whitening_moves_the_error_into_the_metric_of_the_scores(center):
    """The share of the weighted error is then what the table promises, whatever the metric."""
    calibration = ladder_making.calibration(2, 64)
    x = ladder_making.planted(tokens=1024)
    front = {"center": center, "whiten": True}
    _, decoded = round_trip(HadamardStream(bits=4, **front), x, calibration)
    whitener = calibration.whiteners[SITE.layer]
    mean = calibration.components[SITE.layer].mean[:, None] if center else 0
    share = error_share(whitener.whiten(x - mean), whitener.whiten(decoded - mean))
    assert share == pytest.approx(quantizer.mse(quantizer.gaussian_table(4)), rel=0.1)


def test_center_pays_when_there_is_a_mean():
    x = gaussian(2, 512, 64) + 10
    rows = (gaussian(2, 512, 64, seed=1) + 10)[:, None]
    calibration = StreamCalibration(components={SITE.layer: components.fit(rows, None)})
    plain = round_trip(HadamardStream(bits=3), x)[1]
    centred = round_trip(HadamardStream(bits=3, center=True), x, calibration)[1]
    assert (centred - x).square().sum() < 0.05 * (plain - x).square().sum()


# fp8


def test_fp8_keeps_four_significant_bits_down_to_its_smallest_normal():
    x = gaussian(2, 700, 64) * torch.tensor([1e-3, 50.0])[:, None, None]
    encoded, decoded = round_trip(Fp8Stream(), x)
    assert encoded.blocks[0][0].dtype == torch.uint8
    for block, (_, scale) in zip(x.split(512, dim=1), encoded.blocks, strict=True):
        assert torch.allclose(block.abs().amax((1, 2)), 448 * scale)
    scale = torch.cat([s[:, None].expand(2, n) for (_, s), n in zip(encoded.blocks, (512, 188), strict=True)], 1)
    error, normal = (decoded - x).abs(), x.abs() >= 2.0**-6 * scale[..., None]
    assert (error[normal] <= 2.0**-4 * x.abs()[normal] * (1 + 1e-5)).all()
    assert (error <= torch.maximum(2.0**-4 * x.abs(), 2.0**-10 * scale[..., None]) * (1 + 1e-5)).all()


def test_fp8_refuses_the_codes_of_nan():
    codec = build(Fp8Stream())
    encoded = codec.encode(gaussian(1, 3, 8), SITE)
    codes, scale = encoded.blocks[0]
    codes[0, 1, 2] = 0x7F
    with refused(StreamError, "stream.non-finite"):
        codec.decode(dataclasses.replace(encoded, blocks=((codes, scale),)))


# lattices


def everything(dim, boxes, bits):
    book = lattice.codebook(dim, boxes, bits)
    return book, book.points(torch.arange(book.count))


@pytest.mark.parametrize("dim, boxes, bits", [(4, 1, 1), (4, 1, 2), (4, 1, 3), (8, 2, 1), (8, 2, 2)])
def test_a_codebook_is_different_points_of_one_shifted_lattice(dim, boxes, bits):
    book, points = everything(dim, boxes, bits)
    assert len(points.mT.unique(dim=0)) == book.count <= 2 ** (dim * bits)
    assert torch.equal(points.amax(1), -points.amin(1))
    between = points - points[:, :1]
    whole = (between == between.round()).all(0)
    assert (between[:, whole].sum(0) % 2 == 0).all()
    if boxes == 1:
        assert whole.all()
    else:
        halved = between[:, ~whole]
        assert (halved - 0.5 == (halved - 0.5).round()).all() and (halved.sum(0) % 2 == 0).all()


@pytest.mark.parametrize("dim, boxes, bits", [(4, 1, 1), (4, 1, 2), (4, 1, 3), (8, 2, 1), (8, 2, 2)])
@pytest.mark.parametrize("spread_of", [0.4, 1.5, 8.0])
def test_nearest_point_is_the_nearest_of_all(dim, boxes, bits, spread_of):
    book, points = everything(dim, boxes, bits)
    y = gaussian(dim, 60) * spread_of
    y = torch.cat((y, y.round(), (2 * y).round() / 2, torch.zeros(dim, 1)), dim=1)  # and many ties
    found = (book.points(book.nearest(y)) - y).square().sum(0)
    of_all = torch.stack([(points - column[:, None]).square().sum(0).min() for column in y.mT])
    assert torch.allclose(found, of_all, rtol=1e-5, atol=1e-5)


@examples(80)
@given(
    which=st.sampled_from(LATTICES), bits=st.integers(1, 8), shares=st.lists(st.floats(0, 1), min_size=2, max_size=24)
)
def test_every_number_names_the_point_that_it_came_from(which, bits, shares):
    dim, boxes = which
    book = lattice.codebook(dim, boxes, bits)
    assert book.count <= 2 ** (dim * bits)
    chosen = [0, book.count - 1, *(min(int(share * book.count), book.count - 1) for share in shares)]
    numbers = torch.tensor(chosen[: len(chosen) // 2 * 2])
    points = book.points(numbers)
    assert torch.equal(book.nearest(points), numbers)
    data = lattice.to_bytes(numbers, dim, bits)
    assert data.dtype == torch.uint8 and data.numel() * 8 == len(numbers) * dim * bits
    assert torch.equal(lattice.from_bytes(data, dim, bits), numbers)


@pytest.mark.parametrize("dim, boxes", LATTICES)
def test_boxes_use_the_bits_that_they_are_given(dim, boxes):
    for bits in range(2, 8):
        unused = dim * bits - math.log2(lattice.codebook(dim, boxes, bits).count)
        assert 0 <= unused < 0.25


@pytest.mark.parametrize("recipe", [D4Stream(bits=3), E8Stream(bits=3)])
def test_numbers_beyond_the_codebook_are_refused(recipe):
    codec = build(recipe)
    encoded = codec.encode(gaussian(1, 4, 64), SITE)
    data, scale = encoded.blocks[0]
    with refused(StreamError, "stream.out-of-range"):
        codec.decode(dataclasses.replace(encoded, blocks=((torch.full_like(data, 255), scale),)))


@pytest.mark.parametrize("recipe, kind", [(D4Stream, D4Codec), (E8Stream, E8Codec)])
def test_what_is_decoded_lies_in_the_codebook(recipe, kind):
    x = gaussian(2, 40, 63) * torch.logspace(0, 3, 63)
    encoded, decoded = round_trip(recipe(bits=2), x)
    book = lattice.codebook(kind.dim, kind.boxes, 2)
    points = book.points(lattice.from_bytes(encoded.blocks[0][0], kind.dim, 2))
    y = points.mT.reshape(2, 40, 64) * encoded.blocks[0][1].float()[..., None]
    assert torch.allclose(rotation.unrotate(y, recipe(bits=2).seed)[..., :63], decoded, rtol=1e-4, atol=1e-2)
    assert torch.equal(book.nearest(points), lattice.from_bytes(encoded.blocks[0][0], kind.dim, 2))


@pytest.mark.parametrize("dim, boxes, second_moment", [(4, 1, 0.0766032), (8, 2, 0.0716821)])
def test_cells_have_the_known_second_moment(dim, boxes, second_moment):
    """Normalised second moments of the D4 and E8 cells (Conway and Sloane, table 2.3); the cubic one is 1/12."""
    book = lattice.codebook(dim, boxes, 5)
    y = (torch.rand(dim, 40000, generator=torch.Generator().manual_seed(0)) - 0.5) * 20
    error = (book.points(book.nearest(y)) - y).square().mean().item()
    volume = 2 if boxes == 1 else 1
    assert error / volume ** (2 / dim) == pytest.approx(second_moment, rel=0.01)


@pytest.mark.parametrize("dim, boxes, gain", [(4, 1, 0.37), (8, 2, 0.65)])
def test_lattices_beat_integers_at_equal_bits(dim, boxes, gain):
    """On a uniform source at 6 bits the gain over the cubic lattice is the granular one, less the walls."""
    book = lattice.codebook(dim, boxes, 6)
    reach = max(book.boxes[0].levels) / 2
    y = (torch.rand(dim, 20000, generator=torch.Generator().manual_seed(0)) * 2 - 1) * reach
    error = (book.points(book.nearest(y)) - y).square().mean().item()
    cubic = (2 * reach) ** 2 / 12 / 4**6
    assert gain - 0.25 < 10 * math.log10(cubic / error) < gain + 0.05


@pytest.mark.parametrize("kind", [D4Codec, E8Codec])
def test_lattice_steps_are_the_best_ones(kind):
    for bits in range(1, 9):
        book, step = lattice.codebook(kind.dim, kind.boxes, bits), kind.steps[bits - 1]
        y = gaussian(kind.dim, 12000)
        error = {
            factor: (book.points(book.nearest(y / step / factor)) * step * factor - y).square().mean().item()
            for factor in (0.93, 1.0, 1.07)
        }
        assert error[1.0] < 1.01 * min(error.values())


@pytest.mark.parametrize("recipe, known", [(D4Stream, 0.0554), (E8Stream, 0.0366)])
def test_lattices_beat_the_published_ones_at_three_bits(recipe, known):
    """Published: norm and largest coordinate stored, scaled by the latter; 416 and 448 bits a vector."""
    x = gaussian(1, 2048, 128)
    encoded, decoded = round_trip(recipe(bits=3), x)
    assert error_share(x, decoded) < 0.9 * known
    assert len(frame_bytes(encoded)) * 8 / 2048 < 402


# OSCAR


def test_oscar_weighs_less_error_than_integers_at_two_bits():
    calibration = ladder_making.calibration(2, 64)
    x = ladder_making.planted(tokens=512)
    whitener = calibration.whiteners[SITE.layer]
    weighted = {
        recipe.codec: error_share(whitener.whiten(x), whitener.whiten(round_trip(recipe, x, calibration)[1]))
        for recipe in (IntStream(bits=2), OscarStream(bits=2))
    }
    assert weighted["oscar"] < 0.7 * weighted["int"]


@pytest.mark.parametrize("dim", [8, 63, 64])
@pytest.mark.parametrize("center", [False, True])
def test_oscar_turns_into_the_eigenvectors_of_its_moment(dim, center):
    calibration = ladder_making.calibration(2, dim)
    own = StreamCalibration(components=calibration.components)
    mean = calibration.components[SITE.layer].mean.double()
    covariance = calibration.components[SITE.layer].head_covariance.double()
    outer = 0 if center else mean[:, :, None] * mean[:, None]
    chol = calibration.whiteners[SITE.layer].chol.double()
    for held, moment in ((calibration, chol @ chol.mT), (own, covariance + outer)):
        turn = build(OscarStream(bits=2, center=center), held)._turn(SITE.layer, (2, 5, dim)).double()
        wide = hadamard_pad.width(dim)
        assert torch.allclose(turn @ turn.mT, torch.eye(dim, dtype=torch.float64).expand(2, -1, -1), atol=1e-5)
        ordered = turn[..., torch.tensor(oscar.bit_reversal(wide)).argsort()]
        vectors = rotation.hadamard(ordered)[..., :dim] / math.sqrt(wide)
        seen = vectors.mT @ moment @ vectors
        power = seen.diagonal(dim1=-2, dim2=-1)
        assert torch.allclose(seen, torch.diag_embed(power), atol=1e-4 * power.max().item())
        assert (power.diff(dim=-1) <= 1e-4 * power.max()).all()


def test_bit_reversal():
    assert oscar.bit_reversal(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert oscar.bit_reversal(1) == [0]


@pytest.mark.parametrize("ratio, kept", [(0.96, 61), (0.5, 32), (0.01, 0), (0.999, 63), (1.0, 63)])
def test_clipping_is_at_a_rank_of_the_magnitudes(ratio, kept):
    rows = gaussian(2, 3, 64)
    limit = rows.abs().sort(dim=-1).values[..., kept, None]
    assert torch.equal(oscar.clamped(rows, ratio), torch.maximum(torch.minimum(rows, limit), -limit))


def test_oscar_says_what_calibration_it_misses():
    x, whole = ladder_making.planted(), ladder_making.calibration(2, 64)
    value = Site(window=0, layer=SITE.layer, stream="v")
    with refused(CalibrationMismatch, "calibration.missing", "whitener", "layer 1"):
        round_trip(OscarStream(bits=2), x, StreamCalibration(components=whole.components))
    with refused(CalibrationMismatch, "calibration.missing", "covariance", "layer 1"):
        round_trip(OscarStream(bits=2), x, None, value)
    with refused(CalibrationMismatch, "calibration.other-shape", "2 KV heads of 64", "1 of 64"):
        round_trip(OscarStream(bits=2), x[:1], whole)
    round_trip(OscarStream(bits=2), x, StreamCalibration(components=whole.components), value)


def test_oscar_decodes_with_another_instance_as_with_its_own():
    x = ladder_making.planted()
    sigma = torch.eye(64, dtype=torch.float64).expand(2, -1, -1)  # any basis is one of eigenvectors
    whitener = whitening.fit(sigma, ridge=0)
    one, other = (build(OscarStream(bits=3), StreamCalibration({SITE.layer: whitener})) for _ in range(2))
    encoded = one.encode(x, SITE)
    assert torch.equal(one.decode(encoded), other.decode(encoded))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("turned", [False, True], ids=["matrix", "transposed"])
def test_products_do_not_depend_on_how_many_rows_there_are(heads, turned):
    for dim, wide in itertools.product((32, 63, 64, 128), (64, 128)):
        rows, matrix = gaussian(heads, 600, dim), gaussian(heads, dim, wide)
        matrix = matrix.mT.contiguous().mT if turned else matrix
        for own in (matrix, matrix[0]):
            whole = products.product(rows, own)
            for n in (1, 2, 3, 7, 15, 16, 17, 33, 100, 512):
                assert torch.equal(products.product(rows[:, :n].contiguous(), own), whole[:, :n])


def test_nf4_has_the_published_levels():
    """QLoRA's table (arXiv 2305.14314, appendix E), rounded as it is printed there."""
    below = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004)
    above = (0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
    torch.testing.assert_close(nf4.levels(), torch.tensor([*below, *above]), rtol=0, atol=1e-6)


def test_nf4_is_the_nearest_level_of_each_group():
    rows = torch.randn(2, 30, 48, generator=torch.Generator().manual_seed(0))
    codec = nf4.Nf4Codec(Nf4Stream(group=16))
    decoded = codec.decode(codec.encode(rows, Site(0, 0, "k")))
    scale = rows.unflatten(-1, (3, 16)).abs().amax(-1, keepdim=True)
    error = (decoded - rows).unflatten(-1, (3, 16)).abs() / scale
    widest = nf4.levels().diff().max() / 2
    assert error.max() <= widest * 1.001 and error.max() > 0.9 * widest

"""`archive` without a model: exact arithmetic, symbols, steps, and a planted chain of layers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvlab.codecs.archive import ArchiveStream, steps
from kvlab.codecs.archive.codec import ArchiveCodec, one_ahead
from kvlab.codecs.archive.counting import LayerSample
from kvlab.codecs.archive.exact import VALUE, ExactMap, mapped, off_grid, on_grid, power_of_two, unit_of
from kvlab.codecs.archive.fit import fit
from kvlab.codecs.archive.layer import LayerCoder
from kvlab.codecs.archive.model import spectrum_at
from kvlab.codecs.archive.moments import Across
from kvlab.codecs.archive.symbols import CLASSES, LARGEST, LOW_BITS, MOST_CLASS, MOST_INDEX, TABLES, Coder, Symbols
from kvlab.codecs.archive.symbols import classes as classes_of
from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite, StreamError, UserError
from refusals import refused
from tiers import examples

LAYERS, HEADS, HEAD_DIM, TOKENS = 4, 2, 8, 96
WIDTH = HEADS * HEAD_DIM


# -------------------------------------------------------------------------------------------------- arithmetic


def test_powers_of_two_are_exact():
    exponent = torch.arange(-1000, 1000)
    assert power_of_two(exponent).tolist() == [2.0**n for n in range(-1000, 1000)]


@examples(30)
@given(st.integers(0, 2**32), st.integers(1, 700))
def test_a_map_gives_what_whole_numbers_give_in_any_order(seed, n):
    make = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, 3, generator=make, dtype=torch.float64) * 10.0 ** random.Random(seed).randint(-6, 6)
    x = (torch.rand(5, n, generator=make, dtype=torch.float64) * 2 - 1).mul((1 << VALUE) - 1).round()
    exact = ExactMap.of(matrix)
    found = mapped(x, exact.working(VALUE))
    order = torch.randperm(n, generator=make)
    other = ExactMap(exact.coefficients[order], exact.places)
    assert torch.equal(found, mapped(x[:, order], other.working(VALUE)))
    for row, column in ((0, 0), (4, 2)):
        total = sum(int(a) * int(b) for a, b in zip(x[row], exact.coefficients[:, column], strict=True))
        assert float(found[row, column]) == round(total * 2.0 ** -int(exact.places[column]))


def test_a_map_is_near_its_matrix():
    matrix = torch.randn(64, 64, dtype=torch.float64)
    exact = ExactMap.of(matrix)
    back = exact.coefficients.double() * power_of_two(-exact.places.long())
    assert float((back - matrix).abs().max()) <= float(matrix.abs().max()) * 2.0**-14
    assert int(exact.coefficients.abs().max()) < 1 << 15


def test_coefficients_just_below_a_power_of_two_keep_their_sign():
    matrix = torch.tensor([[1 - 2.0**-20], [-(1 - 2.0**-20)]], dtype=torch.float64)
    assert ExactMap.of(matrix).coefficients.flatten().tolist() == [1 << 14, -(1 << 14)]


def test_sums_that_would_not_be_exact_are_refused():
    wide = ExactMap(torch.zeros(512, 1, dtype=torch.int16), torch.zeros(1, dtype=torch.int16))
    wide.working(29)
    with refused(CapabilityError, "capability.not-exact", 512, 30, 15):
        wide.working(30)


def test_values_far_beyond_what_was_seen_stay_on_the_grid():
    unit = unit_of(3.0)
    x = torch.tensor([0.1, -3.0, 100.0, 1e9])
    assert (off_grid(on_grid(x, unit), unit)[:3] - x[:3]).abs().max() < 1e-4
    assert float(off_grid(on_grid(x, unit), unit)[3]) < 1e3


# ----------------------------------------------------------------------------------------------------- symbols


def tables() -> torch.Tensor:
    return torch.ones(CLASSES, LARGEST + 1, dtype=torch.int32)


@examples(60)
@given(st.data())
def test_indices_come_back(data):
    rows, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    values = st.one_of(st.integers(-3, 3), st.integers(-MOST_INDEX, MOST_INDEX), st.sampled_from([-LARGEST, LARGEST]))
    index = data.draw(st.lists(values, min_size=rows * width, max_size=rows * width))
    kind = data.draw(st.lists(st.integers(0, len(TABLES) - 1), min_size=rows * width, max_size=rows * width))
    index = torch.tensor(index, dtype=torch.int32).view(rows, width)
    kind = torch.tensor(kind, dtype=torch.uint8).view(rows, width)
    symbols, coder = Symbols(tables()), Coder()
    symbols.write(coder, index, kind)
    again = Coder(coder.get_compressed())
    assert torch.equal(symbols.read(again, kind), index) and again.is_empty()


def test_a_class_is_a_quarter_octave_and_low_bits_begin_where_tables_end():
    spectrum = torch.arange(-40 * 64, 40 * 64, 5, dtype=torch.int32)
    found = classes_of(spectrum, torch.zeros(1, dtype=torch.int32))[0].long()
    steps_up = found.diff()
    assert int(found[0]) == 0 and int(steps_up.max()) == 1 and int(steps_up.min()) == 0
    assert int(found[-1]) == MOST_CLASS + 24
    assert torch.equal(TABLES[LOW_BITS == 0], torch.arange(CLASSES))
    assert bool((TABLES[LOW_BITS > 0] >= CLASSES - 4).all())


# ------------------------------------------------------------------------------------------------------- steps


@examples(40)
@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=40), st.floats(0.01, 100))
def test_exponents_are_floored_and_know_no_unit(expected, scale):
    expected = torch.tensor(expected, dtype=torch.float64)
    found = steps.exponents(expected)
    assert int(found.min()) >= steps.LEAST and int(found.max()) <= steps.MOST
    assert (steps.exponents(expected * scale) - found).abs().max() <= 1  # a rounding at the edge
    assert bool((found[expected.argsort()].diff() >= 0).all())


def test_a_recipe_asks_for_the_qualities_that_there_are():
    first, last = steps.QUALITIES[0], steps.QUALITIES[-1]
    assert [ArchiveStream(quality=q).quality for q in (first, last)] == [first, last]
    for beyond in (first - 1, last + 1):
        with pytest.raises(ValidationError):
            ArchiveStream(quality=beyond)


def test_an_octave_of_quality_halves_what_an_index_stands_for():
    points, none = torch.tensor([[256.0 * 100]], dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
    values = [float(steps.rebuilt(points, q, none)) * 2.0 ** -steps.places_of(q) for q in range(640, 640 + 129, 64)]
    assert values[0] == pytest.approx(2 * values[1], rel=1e-5) and values[1] == pytest.approx(2 * values[2], rel=1e-5)
    finer = float(steps.rebuilt(points, 640, none + 2)) * 2.0 ** -steps.places_of(640)
    assert finer == pytest.approx(values[0] / 2, rel=1e-5)


# ------------------------------------------------------------------------------------------------ a planted chain


def chain(seed: int, tokens: int, noise: float = 0.05) -> dict[tuple[int, str], torch.Tensor]:
    """Layers of which each is a rotation of the one below and a little noise, [heads, tokens, head_dim]."""
    turns = torch.Generator().manual_seed(99)
    make = torch.Generator().manual_seed(seed)
    state = torch.randn(tokens, 2 * WIDTH, generator=make)
    found = {}
    for layer in range(LAYERS):
        if layer:
            turn = torch.linalg.qr(torch.randn(2 * WIDTH, 2 * WIDTH, generator=turns)).Q
            state = state @ turn + noise * torch.randn(tokens, 2 * WIDTH, generator=make)
        for stream, rows in zip("kv", state.split(WIDTH, dim=1), strict=True):
            found[layer, stream] = rows.view(tokens, HEADS, HEAD_DIM).transpose(0, 1).contiguous()
    return found


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(1)


def fitted(alone: bool = False):
    """On the chain; `alone` cuts what ties the layers."""
    windows = [chain(seed, 400) for seed in range(8)]
    across = []
    for layer in range(LAYERS):
        moments = Across(WIDTH, layer > 0)
        for i, window in enumerate(windows):
            below = windows[i - 1] if alone else window
            places = [(below, layer - 1, s) for s in "kv"] if layer else []
            places += [(window, layer, s) for s in "kv"]
            moments.update([joined(of[n, s]) for of, n, s in places])
        across.append(moments)
    metric = torch.eye(HEAD_DIM, dtype=torch.float64).expand(HEADS, -1, -1) * 1e-4

    def sample(layer: int) -> LayerSample:
        rows = tuple(torch.stack([joined(window[layer, s]) for window in windows[:4]]) for s in "kv")
        return LayerSample(rows, torch.ones(4, 400))

    first = torch.zeros(HEADS, HEAD_DIM, dtype=torch.float64)
    return fit(across, lambda *_: metric, lambda *_: first, sample, None)


@pytest.fixture(scope="module")
def model():
    return fitted()


@pytest.fixture(scope="module")
def codec(model) -> ArchiveCodec:
    return ArchiveCodec(model, None, block=32)


def decoded(codec: ArchiveCodec, body, tokens: int, only: int | None = None) -> dict:
    found = codec.decode(body, list(range(tokens)), only)
    return {(layer, s): x for layer, k, v in found for s, x in (("k", k), ("v", v))}


def coded(codec: ArchiveCodec, cache: dict, quality: int = 700, expected: torch.Tensor | None = None):
    tokens = cache[0, "k"].shape[1]
    expected = torch.ones(LAYERS, tokens) if expected is None else expected
    return codec.encode(cache, list(range(tokens)), expected, quality)


def error(cache: dict, found: dict, tokens: slice = slice(None)) -> float:
    return sum(float((found[at][:, tokens] - x[:, tokens]).square().mean()) for at, x in cache.items()) / len(cache)


def test_what_the_layers_below_say_costs_no_bits(codec):
    cache = chain(50, TOKENS)
    lonely = ArchiveCodec(fitted(alone=True), None, block=32)
    with_prediction, without = (
        sum(len(part) for record in coded(one, cache).records for part in record[1:]) for one in (codec, lonely)
    )
    # noise of a twentieth: log2(20), so 4.3 bits, less in each value but for the noise that decoding leaves
    assert without - with_prediction > 2.0 / 8 * sum(x.numel() for (n, _), x in cache.items() if n)


def test_quality_buys_exactness(codec):
    cache = chain(51, TOKENS)
    bodies = [coded(codec, cache, quality) for quality in (704, 768, 832, 896)]
    errors = [error(cache, decoded(codec, body, TOKENS)) for body in bodies]
    sizes = [body.nbytes for body in bodies]
    assert sizes == sorted(sizes)
    assert all(3.0 < a / b < 5.0 for a, b in pairwise(errors))  # 6 dB an octave


def test_blocks_decode_alone_and_on_any_number_of_threads(codec):
    cache = chain(52, 80)  # the last block is short
    body = coded(codec, cache)
    whole, before = decoded(codec, body, 80), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(x, whole[at]) for at, x in decoded(codec, body, 80).items())
    finally:
        torch.set_num_threads(before)
    for number, span in ((0, slice(0, 32)), (1, slice(32, 64)), (2, slice(64, 80))):
        alone = decoded(codec, body, 80, number)
        assert all(torch.equal(x, whole[at][:, span]) for at, x in alone.items())
    with refused(UserError, "user.no-such-block", "block 3", "0..2"):
        decoded(codec, body, 80, 3)


def test_the_reading_ahead_keeps_order_tells_faults_and_gives_its_thread_back():
    def read(number: int) -> int:
        if number == 3:
            raise StreamError("no third")
        return number

    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            with one_ahead(read, 3) as found:
                assert list(found) == [0, 1, 2]
            with refused(StreamError, None, "no third"), one_ahead(read, 5) as found:
                list(found)
            with one_ahead(read, 3) as found:
                next(found)  # whoever decodes may stop after a layer
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_points_of_both_signs_are_what_magnitudes_stand_for(model):
    coder = LayerCoder(model.streams[1, "k"], 700, spectrum_at(model.streams[1, "k"], 700), model.points[0])
    exponent = torch.randint(-6, 12, (50,), dtype=torch.int32)
    found, index = coder.classes(exponent), torch.randint(-9, 10, (50, WIDTH), dtype=torch.int32)
    own = torch.where(LOW_BITS[found.long()] == 0, model.points[0][TABLES[found.long()], index.abs().clamp(max=3)], 0)
    magnitude = (index.abs().double() * 256 + own).copysign(index)
    assert torch.equal(coder.grid(index, exponent, found), steps.rebuilt(magnitude, 700, exponent))


def test_tokens_that_are_looked_at_are_finer(codec):
    cache, expected = chain(53, TOKENS), torch.ones(LAYERS, TOKENS)
    expected[:, 40] = 2.0**12
    found = decoded(codec, coded(codec, cache, 704, expected), TOKENS)
    assert error(cache, found, slice(40, 41)) < error(cache, found) / 20


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e30])
def test_a_token_beyond_all_that_was_seen_leaves_the_others_alone(codec, scale):
    cache = chain(54, TOKENS)
    plain = error(cache, decoded(codec, coded(codec, cache), TOKENS), slice(0, 50))
    wild = {at: x.clone() for at, x in cache.items()}
    for x in wild.values():
        x[:, 60] *= scale
    found = decoded(codec, coded(codec, wild), TOKENS)
    assert error(wild, found, slice(0, 50)) == pytest.approx(plain)
    assert all(bool(torch.isfinite(x).all()) for x in found.values())


@pytest.mark.parametrize("bits", [2.0, 3.5, 6.0])
def test_bits_that_are_asked_for_are_met(codec, bits):
    cache = chain(55, 200)
    due = bits * sum(x.numel() for x in cache.values()) / 8
    body = codec.encode_to(cache, list(range(200)), torch.ones(LAYERS, 200), due)
    assert abs(body.nbytes / due - 1) <= 0.01


def test_bits_that_cannot_be_met_are_refused(codec):
    cache = chain(55, 40)
    with refused(CapabilityError, "capability.unmet-bits", "10 bytes"):
        codec.encode_to(cache, list(range(40)), torch.ones(LAYERS, 40), 10.0)


def test_what_is_no_cache_is_refused(codec):
    cache = chain(56, 40)
    with refused(UserError, "user.other-length", "40 tokens", "39 token ids"):
        codec.encode(cache, list(range(39)), torch.ones(LAYERS, 40), 700)
    with refused(UserError, "user.out-of-range", "quality 1", "128..1599"):
        codec.encode(cache, list(range(40)), torch.ones(LAYERS, 40), 1)
    with refused(CalibrationMismatch, "calibration.other-shape", "layer 1 v", (2, 40, 7)):
        coded(codec, cache | {(1, "v"): cache[1, "v"][..., :7]})
    with refused(CalibrationMismatch, "calibration.other-shape", "layer 3 v", None):
        coded(codec, {at: x for at, x in cache.items() if at != (3, "v")})
    cache[2, "v"][0, 3, 1] = float("nan")
    with refused(NonFinite, None, "layer 2 v"):
        coded(codec, cache)

"""What holds for every codec. A new codec is in it with its line in `ladder_making.RECIPES`."""

import contextlib
import dataclasses
from itertools import pairwise, product

import pytest
import torch

from codec.ladder_making import BLOCK, CONDITIONS, RECIPES, cases, codec, fresh, own_calibration, planted, storing
from codec.making import SITE, relative_error
from kvlab.codecs import testing
from kvlab.codecs.base import Site
from kvlab.codecs.catalogue import TENSORWISE, UNSTORED
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import CodecNotActive, NonFinite, StreamError
from refusals import refused

NO_NUMBERS = float("nan"), float("inf"), -float("inf")
ALL = pytest.mark.parametrize("name, condition", cases())
STORING = pytest.mark.parametrize("name, condition", storing())
# zero is not their zero, and what lies far outside of the calibrated range is cut off
CALIBRATED = {"klt", "kvquant"}
UNSIGNED = {"turboquant"}  # Walsh-Hadamard without signs brings a constant into one coordinate, which is cut off
STEPPED = {"cast", "ggml", "vllm_types", "quantized_cache"}  # has two rates here, whatever is asked
ONE_RATE = STEPPED | {name for name, made in RECIPES.items() if made(2) == made(6)}
TOGETHER = {"block", "kivi", "fp8", "quantized_cache"}  # a token's code depends on the others of its block


def same(one, other) -> bool:
    """Two codings with equal arrays."""
    pairs = zip(arrays(one), arrays(other), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b)) for a, b in pairs)


def arrays(encoded) -> list[torch.Tensor]:
    return [*encoded.shared, *(array for block in encoded.blocks for array in block)]


def raw(array):
    return array.contiguous().flatten().view(torch.uint8)


def coded(name, condition, x, **settings):
    chosen = codec(name, condition, heads=x.shape[0], dim=x.shape[2], **settings)
    encoded = chosen.encode(x, SITE)
    return chosen, encoded, chosen.decode(encoded)


def test_no_codec_is_left_out():
    assert {RECIPES[name](4).codec for name in RECIPES} == set(TENSORWISE)


class Case(testing.TestedCodec):
    """A codec of the table, with what it fits by itself."""

    def codec(self, heads: int = 2, dim: int = 64):
        return build(self.recipe, own_calibration(self.recipe.codec, heads, dim))


def case(name, condition, bits=4) -> Case:
    recipe = RECIPES[name](bits)
    return Case(type(recipe)(**recipe.model_dump() | CONDITIONS[condition]))


@ALL
@pytest.mark.parametrize("check", [testing.codes_any_shape_and_dtype, testing.refuses_what_it_cannot_code])
def test_it_passes_the_checks_of_every_codec(name, condition, check):
    check(case(name, condition))


@STORING
@pytest.mark.parametrize(
    "check",
    [
        testing.codes_the_same_every_time,
        testing.is_stored_and_read_back,
        testing.refuses_forged_arrays,
        testing.tells_whether_tokens_depend_on_each_other,
    ],
)
def test_it_passes_the_checks_of_codecs_that_store(name, condition, check):
    check(case(name, condition))
    assert case(name, condition).codec().per_token == (name not in TOGETHER)


@ALL
def test_six_bits_lose_little(name, condition):
    for shape in ((2, 1, 64), (2, BLOCK + 1, 63), (1, 5, 6)):
        x = planted(*shape)
        lost = (coded(name, condition, x, bits=6)[2] - x).square().sum() / x.square().sum()
        assert lost < 0.05, shape  # nf4 has four bits in any case


def test_what_cannot_be_coded_is_named():
    x = planted()
    x[1, 3, 5] = float("nan")
    with refused(NonFinite, None, "layer 1 k", "window 7"):
        codec("klt").encode(x, Site(window=7, layer=1, stream="k"))
    with refused(CodecNotActive, "not-active.no-values", "layer 1 k"):
        codec("klt").encode(x[:, :0], SITE)


@ALL
def test_controls_and_they_alone_are_not_packed(name, condition):
    assert coded(name, condition, planted())[1].packed == (name not in UNSTORED)


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_the_same_every_time_and_with_any_threads(name):
    x = planted(tokens=600)  # in blocks that are large enough for a second thread
    chosen = fresh(name, block_size=512)
    encoded = chosen.encode(x, SITE)
    decoded = chosen.decode(encoded)
    assert same(chosen.encode(x, SITE), encoded)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        other = fresh(name, block_size=512)
        again = other.encode(x, SITE)
        assert same(again, encoded)
        assert torch.equal(other.decode(again), decoded)
    finally:
        torch.set_num_threads(before)


@pytest.mark.full
@pytest.mark.parametrize("name, condition", [case for case in cases() if case[0] not in ONE_RATE])
def test_error_falls_with_rate(name, condition):
    x = planted(tokens=8 * BLOCK)
    errors = [relative_error(x, coded(name, condition, x, bits=bits)[2]) for bits in (2, 3, 4, 6)]
    assert all(later < 0.9 * before for before, later in pairwise(errors))


@STORING
def test_bytes_are_real(name, condition):
    x = planted(tokens=16 * BLOCK).bfloat16()
    chosen, encoded, decoded = coded(name, condition, x, bits=3)
    data = frame_bytes(encoded)
    read = read_frame(data)
    assert same(read, encoded)
    assert torch.equal(chosen.decode(read), decoded)
    held = sum(array.numel() * array.element_size() for array in arrays(encoded))
    assert held <= len(data) < held + 64 * (1 + len(encoded.blocks)) + 32
    if name not in {"identity", "fp8", "block"}:
        assert len(data) * 8 / x.numel() < 3 + 2 + 0.5  # float16 minimum and step for every 16 values at the most


@ALL
def test_no_other_block_than_those_that_there_are(name, condition):
    chosen, encoded, _ = coded(name, condition, planted())
    for index in (-1, -len(encoded.blocks), len(encoded.blocks)):
        with pytest.raises(IndexError, match=f"block {index} of"):
            chosen.decode_block(encoded, index)


@STORING
def test_stored_floats_that_are_not_numbers_are_refused(name, condition):
    chosen, encoded, _ = coded(name, condition, planted(tokens=BLOCK + 7))
    first, *others = encoded.blocks
    for (index, array), bad in product(enumerate(first), NO_NUMBERS):
        if array.is_floating_point():
            wrong = array.clone()
            wrong.view(-1)[-1] = bad
            forged = dataclasses.replace(encoded, blocks=((*first[:index], wrong, *first[index + 1 :]), *others))
            for decode in (chosen.decode, lambda stored: chosen.decode_block(stored, 0)):
                with refused(StreamError, "stream.non-finite"):
                    decode(forged)
            for other in range(1, len(encoded.blocks)):
                chosen.decode_block(forged, other)


@STORING
def test_forged_numbers_decode_or_are_refused(name, condition):
    """Right dtypes and shapes, any bits inside: a tensor of the right shape, or a typed refusal."""
    x = planted(tokens=BLOCK + 7)
    chosen, encoded, _ = coded(name, condition, x)
    source = torch.Generator().manual_seed(0)
    for number in range(40):
        blocks = []
        for block in encoded.blocks:
            changed = [array.clone() for array in block]
            for array in changed:
                noise = torch.randint(0, 256, raw(array).shape, generator=source, dtype=torch.uint8)
                struck = torch.rand(noise.shape, generator=source) < (1.0 if number % 2 else 0.01)
                array.flatten().view(torch.uint8)[struck] = noise[struck]
            blocks.append(tuple(changed))
        with contextlib.suppress(StreamError):
            assert chosen.decode(dataclasses.replace(encoded, blocks=tuple(blocks))).shape == x.shape


@ALL
def test_constant_tensors(name, condition):
    for value in (0.0, 1.5, -300.0):
        x = torch.full((2, BLOCK + 3, 64), value)
        _, _, decoded = coded(name, condition, x)
        assert torch.isfinite(decoded).all(), value
        if condition == "plain" and name not in CALIBRATED | UNSIGNED:
            assert (decoded - x).square().mean() <= 0.1 * value**2, value
        if condition == "plain" and name in {"identity", "int", "kivi", "kivi-token"}:
            assert torch.equal(decoded, x), value


@ALL
def test_a_row_of_zeros_among_others(name, condition):
    x = planted()
    x[:, 5] = 0
    _, _, decoded = coded(name, condition, x, bits=6)
    assert torch.isfinite(decoded).all()
    if condition == "plain" and name in {"hadamard", "oscar", "d4", "e8", "fp8", "int", "kivi-token"}:
        assert decoded[:, 5].abs().max() == 0


@ALL
def test_any_magnitude_is_coded_or_refused(name, condition):
    one = planted(tokens=BLOCK + 3)
    for magnitude in (1e-38, 1e-8, 1e3, 1e8, 1e30, 3e37, 3e38):
        x = one / one.abs().max() * magnitude
        try:
            decoded = coded(name, condition, x, bits=6)[2]
        except NonFinite as refused:
            assert magnitude > 1e3 and "layer 1" in str(refused)
            continue
        assert torch.isfinite(decoded).all(), magnitude
        if condition == "plain" and magnitude > 1 and name not in CALIBRATED:
            assert (decoded / magnitude - x / magnitude).norm() < 0.2 * (x / magnitude).norm(), magnitude

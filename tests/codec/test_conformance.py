"""What holds for every codec. A new codec is in it with its line in `ladder_making.RECIPES`."""

import contextlib
import dataclasses
from itertools import pairwise, product

import pytest
import torch

from codec.ladder_making import BLOCK, RECIPES, cases, codec, fresh, planted, storing
from codec.making import SITE, relative_error
from kvlab.codecs.base import Site
from kvlab.codecs.catalogue import TENSORWISE, UNSTORED
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import CodecNotActive, NonFinite, StreamError
from refusals import refused

STORABLE = {
    torch.uint8, torch.int8, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
}  # fmt: skip
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


@ALL
def test_controls_and_they_alone_are_not_packed(name, condition):
    assert coded(name, condition, planted())[1].packed == (name not in UNSTORED)


@ALL
def test_any_shape_and_dtype_comes_back(name, condition):
    shapes = (2, 1, 64), (1, BLOCK, 64), (2, BLOCK + 1, 63), (8, 2 * BLOCK + 3, 64), (1, 5, 6)
    for shape, dtype in product(shapes, (torch.float32, torch.bfloat16)):
        x = planted(*shape).to(dtype)
        _, encoded, decoded = coded(name, condition, x, bits=6)
        assert (tuple(encoded.shape), encoded.layer, encoded.stream) == (shape, SITE.layer, SITE.stream)
        assert (decoded.shape, decoded.dtype) == (x.shape, torch.float32)
        assert all(array.is_contiguous() and array.dtype in STORABLE for array in arrays(encoded))
        lost = (decoded - x.float()).square().sum() / x.float().square().sum()
        assert lost < 0.05, (shape, dtype)  # nf4 has four bits in any case


@STORING
def test_tensors_of_a_batch_are_coded_independently(name, condition):
    first, second = planted(draw=1), 3 * planted(draw=2)
    chosen = codec(name, condition)
    before, between, after = (chosen.encode(x, SITE) for x in (first, second, first))
    assert same(before, after) and not same(before, between)
    assert torch.equal(chosen.decode(before), chosen.decode(after))
    kept = chosen.decode(between)
    second.zero_()
    assert torch.equal(chosen.decode(between), kept)


@ALL
def test_the_same_every_time_and_with_any_threads(name, condition):
    x = planted(tokens=600)  # in blocks that are large enough for a second thread
    chosen = fresh(name, condition, block_size=512)
    encoded = chosen.encode(x, SITE)
    decoded = chosen.decode(encoded)
    assert same(chosen.encode(x, SITE), encoded)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        other = fresh(name, condition, block_size=512)
        again = other.encode(x, SITE)
        assert same(again, encoded)
        assert torch.equal(other.decode(again), decoded)
    finally:
        torch.set_num_threads(before)


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


@STORING
def test_each_block_decodes_alone_to_the_same_values(name, condition):
    for tokens in (1, 2 * BLOCK, 3 * BLOCK + 1):
        x = planted(tokens=tokens)
        chosen, encoded, decoded = coded(name, condition, x)
        seen = torch.zeros_like(x)
        for index in range(len(encoded.blocks)):
            alone = read_frame(frame_bytes(encoded), only=index)
            place, values = chosen.decode_block(alone, index)
            assert torch.equal(values, decoded[place]), (tokens, index)
            seen[place] += 1
        assert torch.equal(seen, torch.ones_like(x)), tokens


@ALL
def test_no_other_block_than_those_that_there_are(name, condition):
    chosen, encoded, _ = coded(name, condition, planted())
    for index in (-1, -len(encoded.blocks), len(encoded.blocks)):
        with pytest.raises(IndexError, match=f"block {index} of"):
            chosen.decode_block(encoded, index)


@ALL
def test_non_finite_input_is_refused_by_name(name, condition):
    x = planted()
    for bad in NO_NUMBERS:
        x[1, 3, 5] = bad
        with refused(NonFinite, None, "layer 1 k", "window 7"):
            codec(name, condition).encode(x, Site(window=7, layer=1, stream="k"))


@ALL
def test_no_tokens_are_refused(name, condition):
    with refused(CodecNotActive, "not-active.no-values", "layer 1 k"):
        codec(name, condition).encode(planted()[:, :0], SITE)


def forgeries(array):
    """Arrays that a recipe cannot have stored in this one's place."""
    yield array.to(torch.int32 if array.dtype != torch.int32 else torch.uint8)
    yield array[None]
    yield torch.cat((array, array[:1]))
    yield torch.cat((array, array), dim=-1)
    yield array[:-1]


@STORING
def test_forged_arrays_are_refused(name, condition):
    x = planted(tokens=BLOCK + 7)
    chosen, encoded, _ = coded(name, condition, x)
    first, *others = encoded.blocks
    forged = [dataclasses.replace(encoded, blocks=blocks) for blocks in ((), tuple(others), (first, *encoded.blocks))]
    for index, array in enumerate(first):
        for wrong in forgeries(array):
            block = (*first[:index], wrong, *first[index + 1 :])
            forged.append(dataclasses.replace(encoded, blocks=(block, *others)))
    forged.append(dataclasses.replace(encoded, blocks=(first[:-1], *others)))
    forged.append(dataclasses.replace(encoded, blocks=((*first, first[0]), *others)))
    forged.append(dataclasses.replace(encoded, shared=(first[0],)))
    for each in forged:
        with pytest.raises(StreamError):
            chosen.decode(each)


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


@STORING
def test_tokens_that_do_not_depend_on_each_other_may_be_cut_anywhere(name, condition):
    x = planted(heads=2, tokens=3 * BLOCK)
    chosen, _, decoded = coded(name, condition, x)
    assert chosen.per_token == (name not in TOGETHER)
    for cuts in ([1] * 3 * BLOCK, [5, 40, 1, 50], [95, 1]):
        parts = [chosen.decode(chosen.encode(part, SITE)) for part in x.split(cuts, dim=1)]
        apart = torch.cat(parts, dim=1)
        assert apart.shape == x.shape
        assert name in TOGETHER or torch.equal(apart, decoded)


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

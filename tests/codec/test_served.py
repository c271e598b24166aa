"""Formats as engines store them, against what the engines themselves made (`served_making.py` says how)."""

import json
from typing import get_args

import gguf
import numpy as np
import pytest
import torch

from codec import served_making
from codec.making import SITE, nbytes
from kvlab.codecs.ggml import BITS, GgmlStream
from kvlab.codecs.quantized_cache import QuantizedCacheStream
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import build
from kvlab.codecs.testing import calibration_of, conformance
from kvlab.codecs.vllm_types import Format, VllmStream

KEPT = json.loads(served_making.FILE.read_text())
ROWS = {
    name: served_making.read(x, torch.bfloat16).view(1, -1, served_making.HEAD_DIM)
    for name, x in KEPT["inputs"].items()
}
CACHES = [("quanto", 4), ("quanto", 2), ("hqq", 8), ("hqq", 4), ("hqq", 2)]
EVERY = pytest.mark.parametrize("name", ROWS)


def coded(stream, x):
    codec = build(stream)
    encoded = codec.encode(x, SITE)
    return encoded.blocks[0], codec.decode(encoded)


def different(ours, theirs) -> int:
    """In how many bytes two codings differ."""
    return int((ours.contiguous().flatten().view(torch.uint8) != theirs).sum())


# --- llama.cpp -----------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("kind", BITS)
def test_blocks_are_those_of_the_compiled_library_to_the_byte(kind, name):
    (blocks,), _ = coded(GgmlStream(type=kind), ROWS[name])
    theirs = served_making.read(KEPT["llama.cpp"][kind][name])
    if kind == "iq4_nl":  # a block of zeros keeps there what codes its memory held, times a step of 0
        nothing = (ROWS[name].unflatten(-1, (-1, 32)) == 0).all(-1).flatten()
        ours, theirs = (x.view(-1, 18)[~nothing].flatten() for x in (blocks, theirs))
        blocks = ours
    assert different(blocks, theirs) == 0


@pytest.mark.parametrize("kind", [kind for kind in BITS if kind != "iq4_nl"])
def test_blocks_are_those_of_the_gguf_package_on_numbers_of_every_size(kind):
    source = torch.Generator().manual_seed(3)
    x = torch.randn(2, 300, 128, generator=source) * (1.5 * torch.randn(2, 300, 128, generator=source)).exp()
    (blocks,), decoded = coded(GgmlStream(type=kind), x)
    of = gguf.GGMLQuantizationType[kind.upper()]
    theirs = gguf.quantize(x.numpy(), of)
    assert np.array_equal(blocks.flatten(2).numpy(), theirs)
    assert np.array_equal(decoded.numpy(), gguf.dequantize(theirs, of))


@EVERY
def test_levels_of_iq4_nl_are_read_as_the_gguf_package_reads_them(name):
    (blocks,), decoded = coded(GgmlStream(type="iq4_nl"), ROWS[name])
    theirs = gguf.dequantize(blocks.flatten(2).numpy(), gguf.GGMLQuantizationType.IQ4_NL)
    assert np.array_equal(decoded.numpy(), theirs)


@pytest.mark.parametrize("head_dim, turned_k", [(64, 64), (128, 128), (192, 64), (80, 0), (32, 0)])
def test_the_rotation_is_llama_cpps(head_dim, turned_k):
    """K over the largest power of two that divides the head, V over 64; no head that 64 does not divide."""
    x = torch.randn(2, 20, head_dim, generator=torch.Generator().manual_seed(4))
    recipe = named_recipe("q8_0-rotated")
    for stream, run in ((recipe.k, turned_k), (recipe.v, min(turned_k, 64))):
        turn = torch.ones(1, 1)
        while run > len(turn):
            turn = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), turn)
        turn = torch.block_diag(*[turn / len(turn) ** 0.5] * (head_dim // len(turn)))
        _, plain = coded(GgmlStream(type="q8_0"), x @ turn)
        off = (coded(stream, x)[1] - plain @ turn).abs()
        assert off.max() < 0.02 and (off > 1e-4).float().mean() < 0.01  # a value on an edge may fall to either side


# --- SGLang --------------------------------------------------------------------------------------------------------


@EVERY
def test_4_bit_floats_are_by_sglangs_rule(name):
    """Written out: the exponent that brings the largest of 16 to 6 or less, then the nearest level, ties outwards."""
    x = ROWS[name].to(torch.bfloat16).float()
    (codes, scales), decoded = coded(VllmStream(format="fp4_e2m1"), ROWS[name])
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = x.reshape(-1, 16).double().numpy()
    power = np.ceil(np.log2(np.maximum(np.abs(groups).max(1) / 6, 1e-10)))
    assert np.array_equal(scales.flatten().numpy(), power + 127)
    scaled = np.abs(groups) / 2.0 ** power[:, None]
    assert scaled.max() <= 6
    away = np.abs(scaled[..., None] - levels)
    place = len(levels) - 1 - away[..., ::-1].argmin(-1)  # of two that are as near, the larger
    due = np.sign(groups) * levels[place] * 2.0 ** power[:, None]
    assert np.array_equal(decoded.reshape(-1, 16).double().numpy(), due)
    signed = (place | 8 * (groups < 0)).reshape(x.shape[1], -1)
    assert np.array_equal(codes.reshape(x.shape[1], -1).numpy(), signed[:, 0::2] | signed[:, 1::2] << 4)


# --- vLLM ----------------------------------------------------------------------------------------------------------


def theirs_of(kind, name):
    return torch.cat([served_making.read(part) for part in KEPT["vllm"][kind][name].split()])


def of_vllm(kind, name):
    """Our arrays in the order of its cache: by token, codes before scales."""
    arrays, _ = coded(VllmStream(format=kind), ROWS[name])
    return [array.contiguous().view(torch.uint8).view(served_making.TOKENS, -1) for array in arrays]


@EVERY
@pytest.mark.parametrize("kind", ["int8_per_token_head", "int4_per_token_head", "ultraquant_k", "ultraquant_v"])
def test_codes_and_scales_per_token_are_those_of_vllms_kernels(kind, name):
    ours = torch.cat([array.flatten() for array in of_vllm(kind, name)])
    assert different(ours, theirs_of(kind, name)) == 0


@EVERY
def test_floats_per_token_have_vllms_scales_and_its_codes_as_far_as_an_interpreter_rounds(name):
    """Triton's interpreter rounds ties away from zero, and drops the carry from a mantissa into the exponent (8)."""
    codes, scales = of_vllm("fp8_per_token_head", name)
    theirs, their_scales = theirs_of("fp8_per_token_head", name).split([codes.numel(), scales.numel()])
    assert different(scales, their_scales) == 0
    apart = codes.flatten().int() - theirs.int()
    assert set(apart.unique().tolist()) <= {-1, 0, 1, 8} and (apart == 0).float().mean() > 0.9


@EVERY
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_floats_of_scale_1_are_those_of_vllms_kernel_for_cpus(kind, name):
    (codes,), _ = coded(VllmStream(format=kind, rounding="zero"), ROWS[name])
    assert different(codes, theirs_of(kind, name)) == 0
    (nearest,), decoded = coded(VllmStream(format=kind), ROWS[name])
    assert set((nearest.int() - codes.int()).unique().tolist()) <= {0, 1, 128}  # the next magnitude; -0.0
    dtype = getattr(torch, kind.replace("fp8", "float8").replace("e4m3", "e4m3fn"))
    assert torch.equal(decoded, ROWS[name].clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float())


@EVERY
@pytest.mark.parametrize("kind", ["even_4", "even_3", "lloyd_max_4", "lloyd_max_3"])
def test_turboquants_slots_are_those_of_vllms_kernels(kind, name):
    ours = torch.cat(of_vllm(kind, name), dim=1)
    assert different(ours, theirs_of(kind, name)) == 0


@EVERY
def test_nvfp4_is_that_of_vllms_emulation(name):
    _, decoded = coded(VllmStream(format="nvfp4"), ROWS[name])
    assert torch.equal(decoded.flatten(), theirs_of("nvfp4", name).view(torch.bfloat16).float())


# --- transformers --------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("backend, bits", CACHES)
def test_what_is_read_back_is_what_transformers_quantized_cache_reads_back(backend, bits, name):
    _, decoded = coded(QuantizedCacheStream(backend=backend, bits=bits), ROWS[name])
    theirs = served_making.read(KEPT["transformers"][f"{backend} {bits}"][name], torch.bfloat16)
    assert torch.equal(decoded.flatten(), theirs.float())


# --- every format --------------------------------------------------------------------------------------------------


FORMATS = [*({"type": kind} for kind in BITS), {"type": "q4_0", "rotation": 64}, {"type": "q8_0", "rotation": 65536}]
FORMATS += [{"format": kind} for kind in get_args(Format)]
FORMATS += [{"backend": backend, "bits": bits} for backend, bits in CACHES]
FORMATS += [{"format": "fp8_e5m2", "scale": "tensor"}, {"format": "fp8_e4m3", "rounding": "zero", "dtype": "float32"}]


CORNERS = (0, len(BITS), len(BITS) + 1, len(BITS) + 2, -3, -2, -1)  # a few of each kind; all at night


@pytest.mark.full
@pytest.mark.parametrize("settings", [FORMATS[number] for number in CORNERS], ids=str)
def test_conforms(settings):
    conforms(settings)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", FORMATS, ids=str)
def test_each_conforms(settings):
    conforms(settings)


def conforms(settings):
    name = {"type": "ggml", "format": "vllm_types", "backend": "quantized_cache"}[next(iter(settings))]
    conformance(name, **settings)


def off_mean(stream, loud: float) -> float:
    """Squared error over what tells tokens apart, of K with one constant channel among Gaussian ones (Qwen's keys)."""
    x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(5))
    x[..., 7] += loud
    codec = build(stream, calibration_of(x))
    return float((codec.decode(codec.encode(x, SITE)) - x).square().mean())


@pytest.mark.full
@pytest.mark.parametrize(
    "plain, turned",
    [
        (GgmlStream(type="q4_0"), GgmlStream(type="q4_0", rotation=64)),
        (VllmStream(format="even_4"), VllmStream(format="int4_per_token_head")),
        (QuantizedCacheStream(backend="quanto", bits=4), VllmStream(format="int4_per_token_head")),
    ],
)
def test_a_constant_loud_channel_breaks_four_bits_and_a_rotation_or_the_mean_mends_it(plain, turned):
    """The channel's step is its size over 8 or 15 for all that share it; turned, it is shared by 64 as one offset."""
    centred = plain.model_copy(update={"center": True})
    quiet, small, large = ([off_mean(one, loud) for one in (plain, turned, centred)] for loud in (0, 30, 1000))
    assert max(quiet) < 0.02
    assert small[0] > 0.25 and small[1] < small[0] / 3 and small[2] < 0.02
    assert min(large[:2]) > 0.4 and large[2] < 0.02  # a rotation divides it by 8, which is not enough


# --- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, bits",
    [
        *((f"{kind}{turn}", bits) for kind, bits in BITS.items() for turn in ("", "-rotated")),
        ("fp8_e4m3", 8),
        ("fp8_e5m2", 8),
        ("int8_per_token_head", 8 + 32 / 64),
        ("fp8_per_token_head", 8 + 32 / 64),
        ("int4_per_token_head", 4 + 32 / 64),
        ("nvfp4", 4.5),
        ("ultraquant_4bit", 4.25),
        *((f"{backend}-int{bits}", bits + 0.5) for backend, bits in CACHES),
        ("turboquant_k8v4", (8 + 4 + 32 / 64) / 2),
        ("turboquant_4bit_nc", (4 + 16 / 64 + 4 + 32 / 64) / 2),
        ("turboquant_k3v4_nc", (3 + 16 / 64 + 4 + 32 / 64) / 2),
        ("turboquant_3bit_nc", (3 + 16 / 64 + 3 + 32 / 64) / 2),
    ],
)
def test_a_value_takes_the_bits_that_the_engine_gives_it(name, bits):
    recipe, x = named_recipe(name), torch.randn(2, 16, 64)
    stored = sum(nbytes(build(stream).encode(x, SITE)) for stream in (recipe.k, recipe.v))
    assert stored * 8 == 2 * x.numel() * bits

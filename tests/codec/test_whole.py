"""KVTC and AQUA-KV without a model: grids, allocation, and planted caches whose layers say each other."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvlab.codecs.aquakv import AquaKvStream
from kvlab.codecs.aquakv import codec as aquakv
from kvlab.codecs.aquakv.codec import AquaKvCodec
from kvlab.codecs.aquakv.grids import INDICES, fitted, grid, nearest
from kvlab.codecs.kvtc import KvtcStream
from kvlab.codecs.kvtc import codec as kvtc
from kvlab.codecs.kvtc.codec import KvtcCodec
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import build
from kvlab.codecs.shared import quantizer
from kvlab.codecs.stream.cache_file import CacheHeader, CacheReader
from kvlab.codecs.stream.whole_file import Owner
from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite, StreamError
from kvlab.core.recipe import Recipe
from refusals import refused
from tiers import examples

LAYERS, HEADS, HEAD_DIM, TOKENS = 4, 2, 8, 96
WIDTH = HEADS * HEAD_DIM
PLACES = [(layer, stream) for layer in range(LAYERS) for stream in "kv"]


# ------------------------------------------------------------------------------------------------------------ grids


@pytest.mark.parametrize("dim, bits", [(dim, bits) for dim, widths in INDICES.items() for bits in widths])
def test_a_grid_loses_less_than_a_table_of_numbers_and_more_than_is_possible(dim, bits):
    x = torch.randn(200_000, dim, generator=torch.Generator().manual_seed(0))
    points = grid(dim, bits)
    near = nearest(x, points)
    error = float((x - points[near]).square().mean())
    assert 2.0 ** (-2 * bits / dim) < error  # the distortion-rate function of N(0, 1)
    if bits % dim == 0:
        gain = 1.01 if bits == dim == 2 else 0.95  # four points in a plane are two by two
        assert error < gain * quantizer.mse(quantizer.gaussian_table(bits // dim))
    count = torch.bincount(near, minlength=len(points)).float()
    means = torch.zeros_like(points).index_add_(0, near, x) / count[:, None]
    assert float(((means - points).square().sum(1) * count).sum() / len(x)) < 0.02 * dim * error  # means of their cells


def test_a_grid_is_what_is_fitted():
    assert grid(2, 2).shape == (4, 2) and float((fitted(2, 2) - grid(2, 2)).abs().max()) < 1e-3


@pytest.mark.parametrize("width", [1, 16, 48, 192])
def test_spreading_is_a_rotation_that_spreads(width):
    turn = aquakv.spreading(width)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(width), rtol=0, atol=1e-5)
    assert float(turn.abs().max()) <= (2 / width) ** 0.5 + 1e-6


# ------------------------------------------------------------------------------------------------------- allocation


def brute(energy, reach, budget):
    """The least error over all ways to divide components into groups, by trying every one."""
    count = len(energy)
    sizes = [size for size in kvtc.SIZES if size <= count]

    def errors(first, left):
        yield float(energy[first:].sum())
        for size, width in itertools.product(sizes, kvtc.WIDTHS):
            price = size * width + kvtc.SIDE
            if first + size <= count and price <= left:
                own = size * float(reach[kvtc.SIZES.index(size), first]) / (12 * (2**width - 1) ** 2)
                for rest in errors(first + size, left - price):
                    yield own + rest

    return min(errors(0, budget))


@examples(30)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 200))
def test_the_widths_are_the_best_there_are(energies, budget):
    energy = torch.tensor(sorted(energies, reverse=True))
    reach = torch.stack([12 * energy / (1 if size == 1 else 2) for size in kvtc.SIZES])
    groups = kvtc.allocate(energy, reach, budget)
    assert [group.first for group in groups] == list(itertools.accumulate((g.size for g in groups), initial=0))[:-1]
    assert sum(group.size * group.width + kvtc.SIDE for group in groups) <= budget
    coded = sum(group.size for group in groups)
    error = float(energy[coded:].sum())
    for group in groups:
        own = float(reach[kvtc.SIZES.index(group.size), group.first])
        error += group.size * own / (12 * (2**group.width - 1) ** 2)
    assert math.isclose(error, brute(energy, reach, budget), rel_tol=1e-4, abs_tol=1e-6)


@examples(20)
@given(st.integers(1, 40), st.sampled_from(kvtc.SIZES), st.integers(0, 99))
def test_ranges_are_of_every_run(count, size, seed):
    rows = torch.randn(3, count, generator=torch.Generator().manual_seed(seed))
    if size <= count:
        runs = rows.unfold(1, size, 1)
        assert torch.equal(kvtc._ranges(rows, size), runs.amax(-1) - runs.amin(-1))


# --------------------------------------------------------------------------------------------------- planted caches


def cache_of(seed: int, tokens: int = TOKENS, noise: float = 0.0, apart: bool = False):
    """K of a layer is a rotation of K below, V one of V below and its own K, and a little noise; a mean beside it.

    With `apart` no layer says anything of another.
    """
    plan, make = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    rows = {at: torch.randn(tokens, WIDTH, generator=make) for at in PLACES}
    for layer in range(1, LAYERS):
        turns = [torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=plan)).Q for _ in range(3)]
        if not apart:
            fresh = [noise * rows[layer, stream] for stream in "kv"]
            rows[layer, "k"] = rows[layer - 1, "k"] @ turns[0] + fresh[0] + 0.5
            rows[layer, "v"] = (rows[layer - 1, "v"] @ turns[1] + rows[layer, "k"] @ turns[2]) / 2**0.5 + fresh[1]
    return {at: x.unflatten(1, (HEADS, HEAD_DIM)).transpose(0, 1).contiguous() for at, x in rows.items()}


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(1)


def owner(**changes) -> Owner:
    known = {"recipe_id": "0" * 12, "calibration_hash": "1" * 16, "model_hash": "2" * 16}
    return Owner(**({"layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM} | known | changes))


def fitted_aquakv(recipe: Recipe, **how) -> dict[str, torch.Tensor]:
    windows = [cache_of(seed, 400, **how) for seed in range(8)]
    found = aquakv.fit(lambda *at: torch.cat([joined(window[at]) for window in windows]), LAYERS, recipe)
    return {f"{aquakv.variant(recipe)}/{name}": tensor for name, tensor in found.items()}


def fitted_kvtc(_recipe: Recipe, **how) -> dict[str, torch.Tensor]:
    found = {}
    for stream in "kv":
        windows = [cache_of(seed, 400, **how) for seed in range(8)]
        rows = torch.cat([torch.cat([joined(w[n, stream]) for n in range(LAYERS)], dim=1) for w in windows])
        fit = kvtc.Fit.of(rows.mean(0), torch.cov(rows.mT), rows[:1000], HEAD_DIM)
        found |= {f"{stream}/{name}": tensor for name, tensor in vars(fit).items()}
    return found


MAKERS = {"aquakv": (AquaKvCodec, AquaKvStream, fitted_aquakv), "kvtc": (KvtcCodec, KvtcStream, fitted_kvtc)}


def made(name: str, bits: float = 2, how: dict | None = None, changes: dict | None = None, **settings):
    codec, stream, fit = MAKERS[name]
    recipe = Recipe(k=stream(bits=bits, **settings), v=stream(bits=bits, **settings))
    return codec(recipe, fit(recipe, **(how or {})), owner(**(changes or {})))


def decoded(codec, data: bytes, tokens: int = TOKENS) -> dict:
    return {(n, s): x for n, k, v in codec.decode(data, range(tokens)) for s, x in (("k", k), ("v", v))}


def error(cache: dict, found: dict) -> float:
    total = sum(float((x - x.mean(1, keepdim=True)).square().sum()) for x in cache.values())
    return sum(float((found[at] - x).square().sum()) for at, x in cache.items()) / total


def test_a_layer_that_is_linear_in_the_one_below_leaves_nothing():
    """What the first layer lost is all that is wrong in the others, and what they lose of their own is next to none."""
    codec, cache = made("aquakv", bits=1), cache_of(50)
    found = decoded(codec, codec.encode(cache, range(TOKENS)))
    first = error({at: x for at, x in cache.items() if at[0] == 0}, found)
    last = error({at: x for at, x in cache.items() if at[0] == LAYERS - 1}, found)
    assert first < 0.012  # of 4 bits, in words of two
    assert last < 1.1 * first
    alone = made("aquakv", bits=1, how={"apart": True})
    lonely = decoded(alone, alone.encode(cache, range(TOKENS)))
    assert error({at: x for at, x in cache.items() if at[0] == LAYERS - 1}, lonely) > 0.2


def test_kvtc_takes_what_layers_have_in_common():
    shared, alone = (made("kvtc", bits=1, how={"apart": apart}) for apart in (False, True))
    cache, other = cache_of(51), cache_of(51, apart=True)
    with_it = error(cache, decoded(shared, shared.encode(cache, range(TOKENS))))
    without = error(other, decoded(alone, alone.encode(other, range(TOKENS))))
    assert with_it < 0.4 * without


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 9, 96])
def test_any_length_and_dtype_comes_back_with_its_ends_exact(name, dtype, tokens):
    codec = made(name, how={"noise": 0.3}, sink=2, recent=4)
    cache = {at: x.to(torch.bfloat16).to(dtype) for at, x in cache_of(52, tokens, noise=0.3).items()}
    data = codec.encode(cache, range(tokens))
    found = decoded(codec, data, tokens)
    assert data == codec.encode(cache, range(tokens))
    for at, x in cache.items():
        assert found[at].shape == x.shape and found[at].dtype == torch.float32
        assert torch.equal(found[at][:, :2], x[:, :2].float()) and torch.equal(found[at][:, -4:], x[:, -4:].float())


@pytest.mark.parametrize("name", MAKERS)
def test_bits_buy_exactness_and_are_real(name):
    cache, sizes, errors = cache_of(53, 400, noise=0.5), [], []
    for bits in (1, 2, 3, 4):
        codec = made(name, bits=bits, how={"noise": 0.5})
        data = codec.encode(cache, range(400))
        sizes.append(8 * len(data) / sum(x.numel() for x in cache.values()))
        errors.append(error(cache, decoded(codec, data, 400)))
    assert sizes == sorted(sizes) and errors == sorted(errors, reverse=True) and errors[-1] < 0.04
    if name == "aquakv":  # the first of four layers has 4 bits, a norm is 16 bits for 16 values, and there is a frame
        assert all(size - (3 * bits + 4) / 4 - 1 < 0.5 for bits, size in zip((1, 2, 3, 4), sizes, strict=True))


def test_fewer_tokens_at_the_ends_cost_fewer_bytes():
    cache = cache_of(54, noise=0.3)
    with_ends, without = (
        len(made("aquakv", how={"noise": 0.3}, **ends).encode(cache, range(TOKENS))) for ends in ({"sink": 8}, {})
    )
    saved = 8 * WIDTH * (2 * LAYERS) * (16 - 2) / 8
    assert 0.7 * saved < with_ends - without < 1.3 * saved


@pytest.mark.parametrize("name", MAKERS)
def test_another_recipe_calibration_model_or_length_is_refused(name):
    cache, how = cache_of(55), {"noise": 0.3}
    codec = made(name, how=how)
    data = codec.encode(cache, range(TOKENS))
    for field, digits in (("recipe_id", 12), ("calibration_hash", 16), ("model_hash", 16)):
        with refused(StreamError, "stream.other-identity", field):
            decoded(made(name, how=how, changes={field: "f" * digits}), data)
    with refused(StreamError, "stream.other-shape", TOKENS - 1):
        decoded(codec, data, TOKENS - 1)
    for changed in range(CacheHeader.SIZE, len(data), len(data) // 40):
        forged = bytearray(data)
        forged[changed] ^= 4
        with pytest.raises(StreamError):
            decoded(codec, bytes(forged))
    with pytest.raises(StreamError):
        decoded(codec, data[:-1])


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_no_cache_is_refused(name):
    codec, cache = made(name), cache_of(56)
    with refused(CalibrationMismatch, "calibration.other-shape", "layer 1 v", (2, 96, 7)):
        codec.encode(cache | {(1, "v"): cache[1, "v"][..., :7]}, range(TOKENS))
    with refused(CalibrationMismatch, "calibration.other-shape", "layer 3 v", None):
        codec.encode({at: x for at, x in cache.items() if at != (3, "v")}, range(TOKENS))
    with refused(CalibrationMismatch, "calibration.other-shape", (2, 95, 8)):
        codec.encode(cache, range(TOKENS - 1))
    cache[2, "v"][0, 3, 1] = float("nan")
    with pytest.raises(NonFinite):
        codec.encode(cache, range(TOKENS))


def test_a_file_that_is_bytes_reads_as_one_on_disk(tmp_path):
    data = made("aquakv").encode(cache_of(57), range(TOKENS))
    (tmp_path / "a").write_bytes(data)
    one, other = CacheReader(data), CacheReader(tmp_path / "a")
    assert one.header == other.header and one.nbytes == other.nbytes == len(data)


def test_bits_without_a_grid_and_tensors_alone_are_refused():
    assert AquaKvStream(bits=2.5).bits == 2.5 and AquaKvStream(bits=1.75, dim=4).dim == 4
    for wrong in ({"bits": 2.2}, {"bits": 3, "dim": 4}, {"bits": 0.5}, {"bits": 2, "dim": 3}):
        with pytest.raises(ValidationError):
            AquaKvStream(**wrong)
    for name in ("kvtc-paper", "aquakv-paper"):
        recipe = named_recipe(name, 2, 3)
        with refused(CapabilityError, "capability.whole-cache", recipe.k.codec):
            build(recipe.k)
        with pytest.raises(ValidationError, match="K and V alike"):
            Recipe(k=recipe.k, v=recipe.v.model_copy(update={"sink": 1}))
        with pytest.raises(ValidationError, match="before the rotary embedding"):
            Recipe(k=recipe.k, v=recipe.k, rotary="after")

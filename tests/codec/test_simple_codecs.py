from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from codec.making import SITE, nbytes, recipe, stream
from kvlab.codecs.base import Site, Stats
from kvlab.codecs.block.codec import BlockCodec
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.registry import build
from kvlab.codecs.shared.seeding import stable_seed
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import NonFinite, StreamError, UnknownName, UserError
from kvlab.core.recipe import CODECS, PluginStream, StreamRecipe
from refusals import refused


def noised(sigma, x, site=SITE, seed=3):
    codec = build(NoiseStream(sigma=sigma, seed=seed))
    encoded = codec.encode(x, site)
    return encoded, codec.decode(encoded)


def test_registry_has_a_codec_for_every_recipe_and_refuses_others():
    recipes = {get_args(tagged)[0] for tagged in get_args(get_args(StreamRecipe)[0])}
    own = recipes - {PluginStream}  # which names a codec of another package: test_plugins builds one
    assert len(own) == len(recipes) - 1 == len(CODECS)
    assert set(CODECS) == {each.model_fields["codec"].default for each in own}
    for each in (IdentityStream(), NoiseStream(sigma=0, seed=0), recipe()):
        assert build(each).recipe == each
    assert isinstance(build(recipe()), BlockCodec)
    with refused(UnknownName, None, "blok", "'block'?"):
        build(SimpleNamespace(codec="blok"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_keeps_every_bit_and_counts_the_bytes_of_its_dtype(dtype):
    x = stream(tokens=50).to(dtype)
    codec = build(IdentityStream())
    encoded = codec.encode(x, SITE)
    decoded = codec.decode(encoded)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, x.float())
    assert encoded.packed and nbytes(encoded) == x.numel() * x.element_size()
    place, values = codec.decode_block(encoded, 0)
    assert torch.equal(decoded[place], values)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            codec.decode_block(encoded, index)
    decoded.zero_()
    x.zero_()
    assert codec.decode(encoded).abs().sum() > 0


@pytest.mark.parametrize("sigma", [0.01, 0.1, 1.0])
def test_planted_sigma_is_recovered(sigma):
    x = 7 * stream(tokens=1000)
    encoded, decoded = noised(sigma, x)
    rms = x.square().mean().sqrt()
    error = (decoded - x) / rms
    n = x.numel()
    assert error.square().mean().sqrt().item() == pytest.approx(sigma, rel=4 / (2 * n) ** 0.5)
    assert abs(error.mean().item()) < 4 * sigma / n**0.5
    assert not encoded.packed
    place, values = build(NoiseStream(sigma=sigma, seed=3)).decode_block(encoded, 0)
    assert torch.equal(decoded[place], values)


def test_noise_is_paired_across_sigmas_and_new_at_every_site():
    x = stream()
    quiet, loud = (noised(sigma, x)[1] - x for sigma in (0.5, 1.0))
    assert torch.allclose(2 * quiet, loud, atol=1e-5)
    assert torch.equal(noised(0.0, x)[1], x)
    others = [Site(1, 1, "k"), Site(0, 2, "k"), Site(0, 1, "v")]
    draws = [loud] + [noised(1.0, x, site)[1] - x for site in others] + [noised(1.0, x, seed=4)[1] - x]
    for i, one in enumerate(draws):
        for other in draws[i + 1 :]:
            assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 0.02


def test_seeds_are_stable_and_separate_their_parts():
    assert stable_seed("a", 1) == 4742018630964328543  # the same in every process
    assert stable_seed("a", 11) != stable_seed("a1", 1)


@pytest.mark.parametrize("stream_recipe", [IdentityStream(), NoiseStream(sigma=0.1, seed=0), recipe()])
def test_every_codec_refuses_non_finite_input(stream_recipe):
    x = stream(tokens=20)
    x[0, 0, 0] = float("inf")
    with refused(NonFinite, None, "layer 1 k"):
        build(stream_recipe).encode(x, SITE)


@pytest.mark.parametrize(
    "arrays", [(), (torch.zeros(2, 5, 63),), (torch.zeros(2, 5, 64, dtype=torch.int32),), (torch.zeros(2, 5, 64),) * 2]
)
def test_identity_refuses_arrays_that_it_did_not_store(arrays):
    codec = build(IdentityStream())
    encoded = codec.encode(stream(tokens=5), SITE)
    for wrong in (replace(encoded, blocks=(arrays,)), replace(encoded, blocks=())):
        with pytest.raises(StreamError):
            codec.decode(wrong)


def test_identity_refuses_numbers_that_are_no_floats():
    with refused(UserError, "user.tensor", "layer 1 k", torch.int32):
        build(IdentityStream()).encode(torch.zeros(2, 5, 64, dtype=torch.int32), SITE)


def test_noise_that_leaves_float32_is_refused():
    with refused(NonFinite, "non-finite.too-large", "layer 1 k", 3e38):
        noised(1.0, torch.full((1, 9, 8), 3e38))


def test_stats_add_up():
    assert Stats((3,), 1, 10) + Stats((4, 5), 2, 20) == Stats((3, 4, 5), 3, 30)

"""Properties of the chain for inputs that hypothesis chooses: rotation, whitening, and every codec end to end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec import ladder_making, making
from kvlab.codecs.base import Site
from kvlab.codecs.shared import rotation, whitening
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from tiers import examples

CASES = ladder_making.storing()
seeds = st.integers(0, 2**32)


def rows(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(exponent=st.integers(0, 8), count=st.integers(1, 20), draw=seeds, seed=seeds)
@examples(40)
def test_rotation_keeps_angles_and_has_an_inverse(exponent, count, draw, seed):
    x = rows(draw, count, 1 << exponent)
    y = rotation.rotate(x, seed)
    torch.testing.assert_close(y @ y.mT / x.shape[-1], x @ x.mT, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rotation.unrotate(y, seed), x, atol=1e-5, rtol=1e-4)


@given(heads=st.integers(1, 3), dim=st.integers(2, 48), tokens=st.integers(1, 20), draw=seeds, seed=st.integers(0, 99))
@examples(40)
def test_whitening_turns_weighted_errors_into_plain_ones_and_has_an_inverse(heads, dim, tokens, draw, seed):
    sigma = making.second_moment(heads, dim, seed)
    whitener = whitening.fit(sigma, ridge=1e-3)
    ridged = sigma * (1 + 1e-3 * torch.eye(dim))
    error = rows(draw, heads, tokens, dim)
    weighted = torch.einsum("htd,hde,hte->ht", error.double(), ridged, error.double())
    torch.testing.assert_close(whitener.whiten(error).double().square().sum(-1), weighted, atol=0, rtol=1e-3)
    torch.testing.assert_close(whitener.unwhiten(whitener.whiten(error)), error, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name, condition", CASES)
@given(
    heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([32, 33]),
    tokens=st.integers(1, 80),
    exponent=st.integers(-6, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    draw=seeds,
    layout=st.sampled_from(["per_head", "mixed_heads"]),
    share_basis=st.booleans(),
    outlier_threshold=st.sampled_from([None, 3.0]),
)
@examples(12)
def test_the_whole_chain(name, condition, heads, dim, tokens, exponent, dtype, draw, **settings):
    """To bytes and back at 6 bits: exact, block by block, finite, and near to what went in."""
    if name == "block":  # with all components: how many a smaller basis loses is the recipe's choice
        codec = ladder_making.fresh(name, condition, 6, heads, dim, pca="exact", **settings)
    else:
        codec = ladder_making.codec(name, condition, bits=6, heads=heads, dim=dim)
    fitted = name.partition("-")[0] in ("klt", "kvquant") or condition != "plain"
    steep = name == "quantized_cache"  # HQQ has no scale above 20,000, so that small values are its zero
    least = -3 if name in ("ggml", "vllm_types") else -6  # a scale of 16 bits loses digits of its own below 1e-6
    scale = 1.0 if fitted or steep else 10.0 ** max(exponent, least)  # what is calibrated is for one scale
    x = (ladder_making.planted(heads, tokens, dim, draw) * scale).to(dtype)
    encoded = codec.encode(x, Site(0, making.SITE.layer, "k"))
    data = frame_bytes(encoded)
    decoded = codec.decode(encoded)
    assert frame_bytes(read_frame(data)) == data
    assert torch.equal(codec.decode(read_frame(data)), decoded)
    covered = torch.zeros(x.shape, dtype=torch.int32)
    for index in range(len(encoded.blocks)):
        place, values = codec.decode_block(read_frame(data, only=index), index)
        assert torch.equal(decoded[place], values)
        covered[place] += 1
    assert (covered == 1).all(), "blocks cover every value once"
    assert decoded.isfinite().all()
    whitener = ladder_making.calibration(heads, dim).whiteners[making.SITE.layer]
    weigh = whitener.whiten if condition == "whiten" else torch.Tensor.float  # whose error the recipe keeps small
    error = weigh(decoded - x.float()).double().square().sum()
    near = 0.2 if name == "nf4" else 0.03  # it has four bits whatever is asked, and codes the mean with the rest
    assert error < near * scale**2 * tokens * energy(heads, dim, weigh)


def energy(heads: int, dim: int, weigh: Callable) -> float:
    """What a planted token deviates from its distribution's mean by, squared, on average."""
    rows = ladder_making.planted(heads, 512, dim)
    return weigh(rows - rows.mean(1, keepdim=True)).double().square().sum().item() / 512

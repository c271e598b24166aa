"""A model rewritten without another function, Q's channels times powers of two and K's over them: no codec may tell.

RoPE turns pairs of channels, so both of a pair are scaled alike. Everything that is weighed by the queries is then
exact in the other writing: the same codes, and decoded K that gives the same scores.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec import ladder_making, making
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.registry import build
from kvlab.codecs.shared import components, whitening
from kvlab.codecs.shared.metric import over_lags, ridged
from kvlab.codecs.stream.bitstream import frame_bytes
from tiers import examples

HEADS, DIM, RIDGE = 2, 32, 1e-3
SITE = Site(0, making.SITE.layer, "k")
ANGLES = torch.arange(12)[:, None] * 0.6 ** torch.arange(DIM // 2)
# OSCAR's rotation follows the eigenvectors of Sigma_q itself, which depend on the channels' units; see the last test.
WHITENED = {name for name, condition in ladder_making.cases() if condition == "whiten"} - {"oscar"}
ONE = torch.ones(DIM, dtype=torch.float64)


def calibrated(units: torch.Tensor) -> StreamCalibration:
    """Everything fitted to the planted stream, for a model whose Q is scaled by `units` and K by the inverse."""
    sigma = units[:, None] * making.second_moment(HEADS, DIM) * units
    rows = ladder_making.planted(HEADS, 512, DIM, draw=99).unflatten(1, (2, 256)) / units.float()
    metric = ridged(over_lags(sigma, ANGLES.cos(), ANGLES.sin()), RIDGE)
    return StreamCalibration(
        whiteners={SITE.layer: whitening.fit(sigma, RIDGE)}, components={SITE.layer: components.fit(rows, metric)}
    )


def coded(name: str, units: torch.Tensor, k: torch.Tensor, whiten: bool = True) -> tuple[bytes, torch.Tensor]:
    """The bytes of K over `units`, and what they are decoded to, times `units`."""
    recipe = ladder_making.RECIPES[name](3)
    known = set(type(recipe).model_fields)
    changes = {field: True for field in ("center", "whiten") if whiten and field in known}
    codec = build(type(recipe)(**{**recipe.model_dump(), **changes}), calibrated(units))
    encoded = codec.encode(k / units.float(), SITE)
    return frame_bytes(encoded), codec.decode(encoded) * units.float()


@pytest.mark.parametrize("name", sorted(WHITENED | {"block", "klt"}))
@given(exponents=st.lists(st.integers(-7, 7), min_size=DIM // 2, max_size=DIM // 2), draw=st.integers(0, 2**32))
@examples(3)
def test_codecs_that_weigh_by_the_queries_do_not_know_the_channels_units(name, exponents, draw):
    units = 2.0 ** torch.tensor(2 * exponents, dtype=torch.float64)
    k = ladder_making.planted(HEADS, 64, DIM, draw)
    (data, decoded), (same_data, same_decoded) = coded(name, ONE, k), coded(name, units, k)
    assert same_data == data
    assert torch.equal(same_decoded, decoded)


@pytest.mark.parametrize("name, whiten", [("hadamard", False), ("int", False), ("block", False), ("oscar", True)])
def test_others_do(name, whiten):
    units, k = ONE.clone(), ladder_making.planted(HEADS, 64, DIM, draw=0)
    units[[3, 3 + DIM // 2]] = 64
    assert coded(name, units, k, whiten)[0] != coded(name, ONE, k, whiten)[0]

"""K after its rotary embedding less its mean by position, against rotations written out."""

from __future__ import annotations

import pytest
import torch

from kvlab.cache.pages.rope import MeanByPosition, Rotation
from kvlab.codecs.shared.grouping import joined
from kvlab.codecs.shared.metric import rotated
from kvlab.codecs.shared.moments import Moments
from kvlab.codecs.shared.turning import RUN, over_positions, turned_about, turned_moments

HEADS, DIM, POSITIONS = 4, 6, 9
ANGLE = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
COS, SIN = ANGLE.cos(), ANGLE.sin()


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 1.3], ids=["plain", "attention-scaling"])
@pytest.mark.parametrize("heads", [1, 3])
def test_second_moments_over_positions_are_the_mean_of_rotated_ones(heads, scale):
    x = some(2, heads * DIM, heads * DIM)
    second, due = x @ x.mT, 0
    for cos, sin in zip(scale * COS, scale * SIN, strict=True):
        turn = torch.block_diag(*[rotated(torch.eye(DIM, dtype=torch.float64), cos, sin).mT] * heads)
        due += turn @ second @ turn.mT / POSITIONS
    torch.testing.assert_close(over_positions(second, heads, scale * COS, scale * SIN), due)


@pytest.mark.parametrize("groups", [1, 2])
def test_moments_are_those_of_what_is_coded_where_k_is_alike_at_all_positions(groups):
    """Every token of each fold stands once at each position."""
    k = some(HEADS, 40, DIM) + 5
    moments = Moments.of(joined(k, groups))
    _, mean, _ = moments.pooled()
    found = turned_moments(moments, HEADS, COS, SIN)
    everywhere = k[:, :, None].expand(-1, -1, POSITIONS, -1)
    coded = turned_about(everywhere, mean.reshape(HEADS, DIM), COS, SIN)
    due = Moments.of(joined(coded.flatten(1, 2), groups))
    (count, own, scatter), (_, theirs, whole) = found.pooled(), due.pooled()
    assert count == 40
    torch.testing.assert_close(own, mean)
    torch.testing.assert_close(theirs, mean)
    torch.testing.assert_close(scatter * POSITIONS, whole)
    torch.testing.assert_close(found.mean, due.mean)
    torch.testing.assert_close(found.scatter * POSITIONS, due.scatter)


@pytest.mark.parametrize("scale", [1.0, 1.3], ids=["plain", "attention-scaling"])
def test_pages_take_the_mean_off_as_the_calibration_does(scale):
    """And turn what is left by how far a token is into its run; the third run is not full."""
    tokens = 2 * RUN + 9
    angle = torch.arange(tokens)[:, None] * ANGLE[1].float()
    k, mean = some(HEADS, tokens, DIM).float() + 3, some(HEADS, DIM, seed=1).float()
    turn = MeanByPosition(Rotation(scale * torch.cat((angle.cos(), angle.sin()), dim=1)), mean)
    positions, seen = torch.arange(tokens), scale * rotated(k, angle.cos(), angle.sin())
    into = angle[positions % RUN]
    coded = turn.undo(seen, positions)
    torch.testing.assert_close(coded, turned_about(k, mean, into.cos(), into.sin()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turn.redo(coded, positions), seen)
    torch.testing.assert_close(coded[:, ::RUN], k[:, ::RUN])  # of a run's first token nothing is turned

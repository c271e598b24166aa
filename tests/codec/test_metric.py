"""The metrics of K and V: what they say an error does is what it does."""

from __future__ import annotations

import pytest
import torch

from codec.making import second_moment
from kvlab.codecs.shared import metric

DIM, LAGS = 8, 6


def rotary(pairs: int = DIM // 2) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(LAGS)[:, None] * 0.7 ** torch.arange(pairs)
    return angles.cos(), angles.sin()


def turned(x: torch.Tensor, position: int, pairs: int = DIM // 2) -> torch.Tensor:
    """The rotary embedding, written as complex multiplication."""
    angle = position * 0.7 ** torch.arange(pairs)
    pair = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.polar(torch.ones(pairs), angle)
    return torch.cat((pair.real, pair.imag, x[..., 2 * pairs :]), dim=-1)


def test_a_keys_error_weighs_as_its_scores_move():
    """Queries of a finite set, keys any lag after them: the mean square of the score's error, by brute force."""
    source = torch.Generator().manual_seed(0)
    queries = torch.randn(5, DIM, generator=source)
    error = torch.randn(DIM, generator=source)
    sigma = (queries.mT @ queries / 5)[None]
    weights = 1 / torch.arange(1.0, LAGS + 1)
    squares = torch.stack(
        [(turned(queries, 9) @ turned(error, 9 - lag)).square().mean() for lag in range(LAGS)]
    )  # fmt: skip
    weighed = error.double() @ metric.over_lags(sigma, *rotary())[0] @ error.double()
    torch.testing.assert_close(weighed.float(), (weights / weights.sum() * squares).sum())


def test_dimensions_that_do_not_turn_keep_their_block():
    sigma = second_moment(2, DIM)
    averaged = metric.over_lags(sigma, *rotary(pairs=2))
    torch.testing.assert_close(averaged[:, 4:, 4:], sigma[:, 4:, 4:])
    torch.testing.assert_close(metric.over_lags(sigma, *(part[:1] for part in rotary())), sigma)


def test_turning_keeps_the_energy_of_each_pair():
    sigma = second_moment(2, DIM)
    averaged = metric.over_lags(sigma, *rotary())
    assert torch.equal(averaged, averaged.mT)
    energy = [m.diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, -1)).sum(-2) for m in (sigma, averaged)]
    torch.testing.assert_close(*energy)


def test_a_values_error_weighs_as_the_output_moves():
    source = torch.Generator().manual_seed(1)
    weight = torch.randn(11, 6 * DIM, generator=source)  # six query heads over two KV heads
    error = torch.randn(2, DIM, generator=source)
    moved = torch.stack([weight[:, j * DIM : (j + 1) * DIM] @ error[j // 3] for j in range(6)])
    weighed = torch.einsum("hd,hde,he->h", error.double(), metric.of_outputs(weight, 2, DIM), error.double())
    torch.testing.assert_close(weighed.float(), moved.square().sum(-1).unflatten(0, (2, 3)).sum(-1))


def test_the_ridge_of_a_channel_is_in_units_of_that_channel():
    sigma = second_moment(2, DIM)
    added = metric.ridged(sigma, 0.5) - sigma
    torch.testing.assert_close(added, 0.5 * sigma * torch.eye(DIM, dtype=sigma.dtype))
    scale = torch.logspace(-3, 3, DIM, dtype=sigma.dtype)
    singular = torch.ones(1, DIM, DIM, dtype=sigma.dtype) * scale[:, None] * scale
    correlation = metric.ridged(singular, 0.5) / (scale[:, None] * scale)
    assert torch.linalg.eigvalsh(correlation).min() == pytest.approx(0.5)


def test_rows_turn_by_their_own_positions():
    rows = torch.randn(3, LAGS, DIM, generator=torch.Generator().manual_seed(2))
    for pairs in (DIM // 2, 2):  # the whole head, and a part of it
        found = metric.rotated(rows, *rotary(pairs))
        for position in range(LAGS):
            torch.testing.assert_close(found[:, position], turned(rows[:, position], position, pairs))
        assert torch.equal(found[..., 2 * pairs :], rows[..., 2 * pairs :])

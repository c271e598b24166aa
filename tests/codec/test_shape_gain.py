from itertools import pairwise

import torch

from codec.making import SITE
from kvlab.codecs.block import shape_gain
from kvlab.codecs.block.stored import Rounding

HALF = Rounding(torch.float16, SITE, whitened=False)


def around(directions, per_direction, spread, seed=0, signed=True):
    source = torch.Generator().manual_seed(seed)
    rows = directions.repeat_interleave(per_direction, 0)
    rows = rows + spread * torch.randn(rows.shape, generator=source)
    if signed:
        rows = rows * torch.where(torch.rand(len(rows), 1, generator=source) < 0.5, -1.0, 1.0)
    rows = rows * (0.2 + 3 * torch.rand(len(rows), 1, generator=source))
    return rows[torch.randperm(len(rows), generator=source)]


def test_finds_planted_directions_up_to_sign():
    directions = torch.linalg.qr(torch.randn(16, 6, generator=torch.Generator().manual_seed(3))).Q.T
    rows = torch.stack([around(directions, 60, 0.03, seed) for seed in range(3)])
    # the start is chosen on the signed cosine, so a direction and its opposite both take a centre
    centres, counts = shape_gain.spherical_kmeans(rows, 12, 32, seed=1)
    assert counts.tolist() == [12] * 3
    assert torch.allclose(centres.norm(dim=-1), torch.ones(3, 12), atol=1e-5)
    match = (directions @ centres.mT).abs().amax(-1)
    assert (match > 0.999).all()
    _, gain, residual = shape_gain.split(rows, centres, HALF)
    assert residual.square().sum() < 0.02 * rows.square().sum()
    assert (gain < 0).any() and (gain > 0).any()


def test_lloyd_rounds_never_lose_alignment():
    rows = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(0))
    energy = []
    for rounds in (0, 1, 2, 4, 8, 32):
        centres, _ = shape_gain.spherical_kmeans(rows, 8, rounds, seed=1)
        unit = torch.nn.functional.normalize(rows, dim=-1)
        energy.append((unit @ centres.mT).abs().amax(-1).sum().item())
    assert all(later >= before - 1e-3 for before, later in pairwise(energy))
    assert energy[-1] > energy[0]


def test_no_more_centres_than_rows_with_a_direction():
    rows = torch.zeros(3, 10, 4)
    rows[1, :3] = torch.eye(4)[:3]
    rows[2] = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    centres, counts = shape_gain.spherical_kmeans(rows, 16, 8, seed=1)
    assert counts.tolist() == [1, 3, 10]
    assert centres.shape == (3, 10, 4)
    assert (centres[0] == 0).all() and (centres[1, 3:] == 0).all()
    assert torch.isfinite(centres).all()


def test_assignment_ignores_the_sign():
    source = torch.Generator().manual_seed(3)
    directions = torch.linalg.qr(torch.randn(16, 4, generator=source)).Q.T
    unit = torch.nn.functional.normalize(around(directions, 50, 0.05), dim=-1)[None]
    start = torch.nn.functional.normalize(directions + 0.15 * torch.randn(4, 16, generator=source), dim=-1)[None]
    found = shape_gain.lloyd(unit, start, 16)[0]
    assert ((found * directions).sum(-1) > 0.999).all()


def test_each_block_is_clustered_as_if_alone():
    rows = torch.randn(64, 40, 16, generator=torch.Generator().manual_seed(2))
    together, _ = shape_gain.spherical_kmeans(rows, 2, 32, seed=1)
    alone = torch.cat([shape_gain.spherical_kmeans(block[None], 2, 32, seed=1)[0] for block in rows])
    assert torch.allclose(together, alone, atol=1e-5)


def test_split_uses_the_rounded_gain_and_the_larger_cosine():
    centres = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    rows = torch.tensor([[[1 / 3, 0.1], [0.2, -2.0001], [0.0, 0.0]]])
    segment, gain, residual = shape_gain.split(rows, centres, HALF)
    assert segment.tolist() == [[0, 1, 0]]
    assert gain.dtype == torch.float16
    assert gain[0, 1] < 0
    assert torch.equal(residual + shape_gain.predict(centres, segment, gain), rows)
    assert residual[0, 0, 0] == 1 / 3 - gain[0, 0].float()
    assert (residual[0, 2] == 0).all()

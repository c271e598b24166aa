import pytest
import torch

from codec.making import second_moment
from kvlab.codecs.klt.marginal import Marginals
from kvlab.codecs.shared import components, covariance, whitening
from kvlab.codecs.shared.grouping import joined
from kvlab.codecs.shared.moments import folds
from kvlab.codecs.shared.quantizer import gaussian_table, mse
from kvlab.codecs.shared.sketch import PSEUDO_SAMPLES, gaussian_sketch, ranks, sketch
from kvlab.core.errors import CalibrationMismatch, NonFinite
from refusals import refused


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def planted(tokens, dim=32, seed=0, memory=0.0, heads=1):
    """Rows [heads, 1, tokens, dim] of a known covariance, an AR(1) process of that memory along the tokens."""
    scale = torch.logspace(0, -1.5, dim, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=source(99), dtype=torch.float64)).Q
    noise = torch.randn(heads, tokens, dim, generator=source(seed), dtype=torch.float64)
    for t in range(1, tokens):
        noise[:, t] = memory * noise[:, t - 1] + (1 - memory**2) ** 0.5 * noise[:, t]
    return ((noise * scale) @ turn + 3)[:, None], turn.T @ torch.diag(scale.square()) @ turn


def test_planted_mean_covariance_and_variances_are_recovered():
    rows, truth = planted(20_000)
    fitted = components.fit(rows, None)
    scale = truth.diagonal().mean()
    assert torch.allclose(fitted.mean[0].double(), torch.full((32,), 3.0, dtype=torch.float64), atol=0.02)
    assert torch.allclose(fitted.covariance[0].double(), truth, atol=0.05 * scale)
    assert torch.allclose(fitted.variance[0].double(), torch.linalg.eigvalsh(truth).flip(0), rtol=0.08)
    assert all(value.dtype == torch.float32 and value.is_contiguous() for value in vars(fitted).values())


def test_components_are_uncorrelated_and_their_error_is_the_weighted_error():
    rows, _ = planted(3000, dim=64, heads=2)
    metric = second_moment()
    metric = metric + 1e-3 * metric.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(64)
    fitted = components.fit(rows, metric)
    forward = fitted.forward.double()
    y = joined(rows[:, 0] - fitted.mean[:, None], 1) @ forward
    seen = y.mT @ y / (y.shape[1] - 1)
    off = seen - torch.diag_embed(seen.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-3 * seen.abs().max()
    error = torch.randn(2, 100, 64, generator=source(5), dtype=torch.float64)
    direct = torch.einsum("htd,hde,hte->", error, metric, error)
    assert (joined(error, 1) @ forward).square().sum() == pytest.approx(direct.item(), rel=1e-4)
    identity = fitted.forward.double() @ fitted.inverse.double()
    assert torch.allclose(identity, torch.eye(128, dtype=torch.float64)[None], atol=1e-3)
    assert torch.allclose(fitted.head_metric, metric, rtol=1e-4, atol=1e-4 * metric.abs().max())
    assert (fitted.variance.diff(dim=1) <= 0).all() and (fitted.variance > 0).all()


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_shrunk_variances_beat_eigenvalues_out_of_sample(memory):
    rows, _ = planted(800, memory=memory, heads=4)
    unseen, _ = planted(16_000, seed=1, memory=memory, heads=4)
    fitted = components.fit(rows, None)
    y = joined(unseen[:, 0] - fitted.mean[:, None], 1) @ fitted.forward.double()
    met = y.square().mean(1)
    raw, _ = covariance.principal(torch.stack([torch.cov(r.mT) for r in joined(rows[:, 0], 1)]))

    def loss(variance):  # Stein's, what a Gaussian code pays in bits for a wrong variance
        ratio = met / variance
        return (ratio - ratio.log() - 1).mean().item()

    assert loss(fitted.variance.double()) < 0.6 * loss(raw)


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0, 0.5], [5.0], [2.0, 2.0, 7.0, 1.0, 1.5]])
def test_descending_is_isotonic_least_squares(values):
    values = torch.tensor(values, dtype=torch.float64)
    found = covariance.descending(values)
    assert (found.diff() <= 0).all()
    assert found.sum() == pytest.approx(values.sum().item())
    pooled = [[v, 1] for v in values.tolist()]  # pool adjacent violators
    at = 0
    while at < len(pooled) - 1:
        if pooled[at][0] < pooled[at + 1][0]:
            (a, n), (b, m) = pooled[at], pooled.pop(at + 1)
            pooled[at] = [(a * n + b * m) / (n + m), n + m]
            at = max(at - 1, 0)
        else:
            at += 1
    expected = [v for v, n in pooled for _ in range(n)]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64))


def test_folds_are_runs_that_cover_every_token_once():
    for count in (4, 5, 31, 1000):
        runs = folds(count)
        assert [t for run in runs for t in range(count)[run]] == list(range(count))
        assert all(run.stop - run.start >= 2 for run in runs) and len(runs) <= 16


def test_sketch_of_few_samples_is_nearly_gaussian_and_of_many_their_own():
    uniform = torch.distributions.Uniform(-(3**0.5), 3**0.5)
    few, many = (sketch(uniform.icdf((torch.arange(n).double() + 0.5) / n)[None]) for n in (200, 60 * PSEUDO_SAMPLES))
    assert torch.allclose(few, gaussian_sketch(1), atol=0.15)
    assert many[0, -1] < 2.2 and many[0, 200] == pytest.approx(uniform.icdf(torch.tensor(200.5 / 256)).item(), abs=0.05)


def test_tables_of_a_gaussian_sketch_are_the_gaussian_ones():
    marginals = Marginals(gaussian_sketch(2))
    for width in range(1, 9):
        table = marginals.tables[width]
        ideal = gaussian_table(width)
        assert mse(table.values[0]) == pytest.approx(mse(ideal), rel=0.01)
        assert table.distortion[1].item() == pytest.approx(mse(ideal), rel=0.01)
        assert table.mass.sum(1).tolist() == pytest.approx([1, 1])
    assert marginals.tables[0].values.abs().max() < 1e-6


def test_tables_fit_the_shape_that_the_sketch_has():
    skewed = (ranks(256).exp() - 1.65)[None] / 2.16
    fitted = Marginals(skewed)
    z = torch.randn(100_000, generator=source(), dtype=torch.float64).exp().sub(1.65).div(2.16)
    z = z[z < 8]
    for width in (1, 3):
        own, gaussian = fitted.tables[width].values[0], gaussian_table(width)
        errors = [(z[:, None] - t).abs().amin(1).square().mean() for t in (own, gaussian)]
        assert errors[0] < 0.8 * errors[1]


def test_constant_components_stay_finite():
    rows, _ = planted(300)
    rows[..., :5] = 7.0
    fitted = components.fit(rows, None)
    assert all(torch.isfinite(value).all() for value in vars(fitted).values())
    assert (fitted.variance > 0).all()
    assert torch.isfinite(vars(components.fit(torch.full((1, 2, 8, 4), 2.5), None))["sketch"]).all()


def test_fewer_tokens_than_dimensions_are_allowed_and_few_are_not():
    fitted = components.fit(planted(20)[0], None)
    assert torch.isfinite(fitted.variance).all() and fitted.variance[0, -1] > 0
    with refused(CalibrationMismatch, "calibration.too-few-tokens", "3 tokens"):
        components.fit(torch.randn(1, 1, 3, 8), None)


def test_broken_input_is_refused():
    rows, _ = planted(50)
    with refused(CalibrationMismatch, "calibration.other-shape", "metric", [1, 16, 16]):
        components.fit(rows, torch.eye(16)[None])
    with pytest.raises(whitening.NotPositiveDefinite):
        components.fit(rows, -torch.eye(32)[None])
    rows[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFinite):
        components.fit(rows, None)


def test_the_fit_repeats_itself_bit_by_bit():
    rows, _ = planted(500)
    one, other = components.fit(rows, None), components.fit(rows, None)
    assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))

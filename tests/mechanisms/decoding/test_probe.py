"""The probe: it finds planted rules, is where another optimiser ends, and does not speak untrained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import optimize, special

from kvlab.core.errors import CalibrationMismatch, Fault, StorageError
from kvlab_mechanisms.decoding.probe import counted, drift, expected, fit_probe
from refusals import refused

pytestmark = pytest.mark.full


def planted(samples: int, classes: int = 3, width: int = 12, noise: float = 1.0, seed: int = 0):
    chance = torch.Generator().manual_seed(seed)
    rule = 2 * torch.randn(classes, width, generator=torch.Generator().manual_seed(9))
    x = torch.randn(samples, width, generator=chance)
    gumbel = -torch.log(-torch.log(torch.rand(samples, classes, generator=chance)))
    return x, (x @ rule.T + noise * gumbel).argmax(1)


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    ranks = scores.argsort().argsort() + 1.0
    count = positive.sum()
    return (ranks[positive].sum() - count * (count + 1) / 2) / (count * (~positive).sum())


def test_it_recovers_a_planted_rule():
    probe = fit_probe(*planted(1500, noise=0.1))
    x, y = planted(1000, noise=0.1, seed=1)
    p = probe.probabilities(x).numpy()
    assert all(auc(p[:, c], (y == c).numpy()) > 0.99 for c in range(3))


@pytest.mark.parametrize("ridge", [0.1, 1.0, 30.0])
def test_it_ends_where_another_optimiser_does(ridge):
    x, y = planted(300)
    xs, ys = x.double().numpy(), y.numpy()

    def loss(flat):
        w, b = flat[:36].reshape(3, 12), flat[36:]
        z = xs @ w.T + b
        p = special.softmax(z, 1)
        p[np.arange(len(ys)), ys] -= 1
        value = (special.logsumexp(z, 1) - z[np.arange(len(ys)), ys]).sum() + ridge / 2 * (w**2).sum()
        return value, np.concatenate([(p.T @ xs + ridge * w).ravel(), p.sum(0)])

    best = optimize.minimize(loss, np.zeros(39), jac=True, method="BFGS", options={"gtol": 1e-7}).x
    probe = fit_probe(x, y, ridge)
    assert np.abs(probe.weight.numpy() - best[:36].reshape(3, 12)).max() < 1e-3
    assert np.abs(probe.bias.numpy() - (best[36:] - best[36:].mean())).max() < 1e-3


def test_two_binary_features_have_their_closed_form():
    """Without a ridge, one feature of 0 and 1 gives each group its own log-odds."""
    x = torch.tensor([[0.0]] * 10 + [[1.0]] * 10)
    y = torch.tensor([1] * 3 + [0] * 7 + [1] * 8 + [0] * 2)
    p = fit_probe(x, y, ridge=1e-9).probabilities(torch.tensor([[0.0], [1.0]]))
    assert torch.allclose(p[:, 1], torch.tensor([0.3, 0.8]).double(), atol=1e-5)


def test_a_law_at_one_token_is_the_token():
    x = torch.stack([counted(torch.tensor(ids), 6) for ids in ([0, 1, 1], [1, 0], [4, 5], [5, 5, 4])])
    probe = fit_probe(x, torch.tensor([0, 0, 1, 1]))
    law = torch.full((1, 6), -1e9)
    law[0, 4] = 0
    assert torch.allclose(probe.logits(expected(law)), probe.logits(counted(torch.tensor([4]), 6)))
    assert torch.allclose(probe.probabilities(x).sum(-1), torch.ones(4).double())


def test_verdicts_fall_as_the_threshold_rises():
    x, y = planted(200)
    probe = fit_probe(x, y)
    counts = [int(probe.verdicts(x, 1, threshold).sum()) for threshold in np.linspace(0, 1, 21)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 200 and counts[-1] == 0


def test_the_temperature_mends_overconfidence_on_held_out_data():
    x, y = planted(60, width=40)
    held, fresh = planted(2000, width=40, seed=2), planted(4000, width=40, seed=3)

    def gap(probe) -> float:
        p, label = probe.probabilities(fresh[0]).max(-1)
        edges = torch.bucketize(p, torch.linspace(0.4, 1, 13))
        bins = [edges == i for i in edges.unique()]
        right = (label == fresh[1]).double()
        return sum(float(b.double().mean() * (p[b].mean() - right[b].mean()).abs()) for b in bins)

    bare, mended = fit_probe(x, y, 0.01), fit_probe(x, y, 0.01, held)
    assert mended.temperature > 1.5
    assert gap(mended) < 0.05 < gap(bare)


def test_it_goes_through_a_file_and_refuses_what_it_was_not_trained_for(tmp_path):
    x, y = planted(100)
    probe = fit_probe(x, y, held=planted(50, seed=5))
    probe.save(tmp_path / "probe.safetensors")
    again = type(probe).load(tmp_path / "probe.safetensors")
    assert torch.equal(again.logits(x), probe.logits(x))
    assert (again.temperature, again.data) == (probe.temperature, probe.data)
    assert fit_probe(x, y.flip(0)).data != probe.data
    with refused(CalibrationMismatch, "calibration.other-features", 12, 11):
        probe.logits(torch.zeros(3, 11))
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    for other in ("other.safetensors", "none.safetensors"):
        with refused(StorageError, "storage.no-probe", tmp_path / other):
            type(probe).load(tmp_path / other)
    for labels in (torch.zeros(100), 2 * (y > 0)):
        with refused(Fault, "fault.too-few-classes"):
            fit_probe(x, labels.long())


def test_drift_is_none_for_the_same_run_and_grows_with_what_moved():
    x, y = planted(300)
    probe = fit_probe(x, y)
    found = [
        drift(probe, x, x + scale * torch.randn(300, 12, generator=torch.Generator().manual_seed(1)))
        for scale in (0, 0.05, 1)
    ]
    assert (found[0].logit, found[0].flips) == (0, 0)
    assert found[0].logit < found[1].logit < found[2].logit
    assert found[1].flips < found[2].flips

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import Fault, NonFinite
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.multiple import benjamini_hochberg, holm, sign_flip_p, sign_flip_two_sided_p
from kvlab.stats.power import (
    effective_tokens,
    power_factor,
    predicted_standard_error,
    windows_for_sign,
    windows_needed,
)
from kvlab.stats.slope import linear_range, log_log_slope
from refusals import refused

BOOT = Bootstrap(800, 0.95, 0)


def make(values):
    windows, tokens = values.shape
    return Column.of(np.repeat(np.arange(windows), tokens), np.tile(np.arange(tokens), windows), values.ravel())


def test_benjamini_hochberg_by_hand():
    # m p / rank: .005*5/1, .009*5/2, .05*5/3, .039*5/4 is out of order, .5
    p = [0.05, 0.005, 0.5, 0.009, 0.051]
    assert benjamini_hochberg(p) == pytest.approx([0.06375, 0.0225, 0.5, 0.0225, 0.06375])
    assert benjamini_hochberg([0.9, 1.0]) == pytest.approx([1, 1])
    with pytest.raises(NonFinite):
        benjamini_hochberg([0.1, np.nan])


def test_holm_by_hand():
    # sorted: .005*5, .009*4, .05*3, .051*2 is smaller than the one before, .5
    assert holm([0.05, 0.005, 0.5, 0.009, 0.051]) == pytest.approx([0.15, 0.025, 0.5, 0.036, 0.15])
    assert holm([0.9, 1.0]) == pytest.approx([1, 1]) and holm([]).size == 0
    with pytest.raises(NonFinite):
        holm([0.1, np.nan])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.5))
def test_holm_rejects_what_its_steps_reject(p, alpha):
    """The adjusted p is at most alpha exactly where the sequential procedure of 1979 rejects."""
    rejected, m = set(), len(p)
    for step, number in enumerate(sorted(range(m), key=p.__getitem__)):
        if p[number] * (m - step) > alpha:
            break
        rejected.add(number)
    assert {number for number, q in enumerate(holm(p)) if q <= alpha} == rejected
    assert all(b >= a for a, b in zip(p, holm(p), strict=True))


def test_sign_flip_counts_all_patterns_when_it_can():
    assert sign_flip_p(np.array([1.0, 2.0, 3.0]), draws=100, seed=0) == 1 / 8
    assert sign_flip_p(np.array([-1.0, 2.0, 3.0]), draws=100, seed=0) == 2 / 8
    assert sign_flip_p(np.zeros(5), draws=100, seed=0) == 1


def test_sign_flip_holds_its_level_and_finds_effects():
    rng = np.random.default_rng(0)
    p = [sign_flip_p(rng.standard_normal(32), draws=400, seed=1) for _ in range(300)]
    assert 0.02 < np.mean(np.array(p) <= 0.05) < 0.09
    assert sign_flip_p(rng.standard_normal(32) + 2, draws=400, seed=1) == 1 / 401


def test_two_sided_sign_flip_counts_both_directions():
    assert sign_flip_two_sided_p(np.array([1.0, 2.0, 3.0]), draws=100, seed=0) == 2 / 8
    assert sign_flip_two_sided_p(np.array([-1.0, -2.0, -3.0]), draws=100, seed=0) == 2 / 8
    # |sum| >= 4 of 1, 2, 3 with any signs: 6, 4 and their opposites
    assert sign_flip_two_sided_p(np.array([-1.0, 2.0, 3.0]), draws=100, seed=0) == 4 / 8
    assert sign_flip_two_sided_p(np.zeros(5), draws=100, seed=0) == 1
    with pytest.raises(Fault):
        sign_flip_two_sided_p(np.array([]), draws=100, seed=0)


def test_two_sided_sign_flip_holds_its_level_and_finds_either_direction():
    rng = np.random.default_rng(0)
    p = [sign_flip_two_sided_p(rng.standard_normal(32), draws=400, seed=1) for _ in range(300)]
    assert 0.02 < np.mean(np.array(p) <= 0.05) < 0.09
    for shift in (-2, 2):
        assert sign_flip_two_sided_p(rng.standard_normal(32) + shift, draws=400, seed=1) == 1 / 401


def test_predicted_standard_error_is_what_delta_nll_scatters():
    """Logit noise on a real distribution: the second-order prediction holds within a few per cent."""
    rng = np.random.default_rng(0)
    tokens, vocabulary = 20000, 64
    p = rng.dirichlet(np.ones(vocabulary))
    shift = 0.05 * rng.standard_normal((tokens, vocabulary))
    q = p * np.exp(shift)
    q /= q.sum(1, keepdims=True)
    labels = rng.choice(vocabulary, tokens, p=p)
    delta = np.log(p[labels]) - np.log(q[np.arange(tokens), labels])
    kl = (p * np.log(p / q)).sum(1).mean()
    assert predicted_standard_error(kl, tokens) == pytest.approx(delta.std() / math.sqrt(tokens), rel=0.05)
    with pytest.raises(Fault):
        predicted_standard_error(kl, 0)


def test_effective_tokens():
    rng = np.random.default_rng(0)
    independent = rng.standard_normal((200, 20))
    copies = np.repeat(rng.standard_normal((200, 1)), 20, axis=1)
    for values, expected in ((independent, 4000), (copies, 200)):
        assert effective_tokens(make(values), make(values**2)) == pytest.approx(expected, rel=0.15)


def test_windows_needed():
    assert windows_needed(width=0.02, distance=0.01, n_windows=32) == 129
    assert windows_needed(width=0.01, distance=0.02, n_windows=32) == 33
    assert windows_needed(width=0.01, distance=0.0, n_windows=32) is None
    open_, settled = Estimate(0.5, -0.5, 1.5, 10, 100, "bca"), Estimate(0.5, 0.1, 0.9, 10, 100, "bca")
    assert windows_for_sign(open_, power=0.5) == 41
    assert windows_for_sign(open_) == 82  # 40 times 2.04
    assert windows_for_sign(settled) == 10
    assert windows_for_sign(Estimate(-0.5, -1.5, 0.5, 10, 100, "bca"), power=0.5) == 41
    assert windows_for_sign(Estimate(0.0, -1.0, 1.0, 10, 100, "bca")) is None


def test_power_factor_by_hand():
    assert power_factor(0.95) == pytest.approx(((1.959964 + 0.841621) / 1.959964) ** 2, rel=1e-6)
    assert power_factor(0.9, 0.9) == pytest.approx(((1.644854 + 1.281552) / 1.644854) ** 2, rel=1e-6)
    assert power_factor(0.99, 0.5) == pytest.approx(1)
    for confidence, power in ((1.0, 0.8), (0.95, 0.0), (0.95, 1.0)):
        with refused(Fault, "fault.probability", confidence, power):
            power_factor(confidence, power)


@pytest.mark.parametrize(("confidence", "effect"), [(0.95, 0.25), (0.95, -0.25), (0.8, 0.15)])
def test_windows_for_sign_have_the_power_that_they_promise(confidence, effect):
    """Planted: an effect of known size and scatter, measured anew on as many windows as were asked for."""
    pilot, edge = 20, NormalDist().inv_cdf(0.5 + confidence / 2)
    half = edge / math.sqrt(pilot)  # of an interval over the pilot's windows, whose scatter is 1
    found = Estimate(effect, effect - half, effect + half, pilot, pilot, "t", confidence)
    needed, boot = windows_for_sign(found), Bootstrap(400, confidence, 0)
    rng = np.random.default_rng(5)
    again = [boot.mean(make(effect + rng.standard_normal((needed, 1)))) for _ in range(400)]
    assert 0.75 < np.mean([one.low * np.sign(effect) > 0 < one.high * np.sign(effect) for one in again]) < 0.85


def test_linear_range():
    x = np.array([0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0])
    kl = np.array([0.0, 9e-8, 1e-6, 9e-6, 1e-4, 3e-3, 0.2])  # from 0.1 to 0.3 the slope is above three
    assert linear_range(x, kl, floor=1e-8).tolist() == [False, False, True, True, True, False, False]
    quadratic = 3 * x**2
    assert linear_range(x, quadratic, floor=0).tolist() == [False, True, True, True, True, True, False]


def test_slope_is_recovered():
    rng = np.random.default_rng(0)
    x = np.array([0.01, 0.03, 0.1])
    window = np.exp(0.3 * rng.standard_normal((16, 1)))
    columns = [make(0.5 * s**1.7 * window * rng.gamma(20, 0.05, (16, 10))) for s in x]
    slope = log_log_slope(BOOT, x, columns)
    assert slope.low < 1.7 < slope.high
    assert slope.resolvable < 0.1
    exact = [make(s**2 * window) for s in x]
    assert log_log_slope(BOOT, x, exact).value == pytest.approx(2)
    with refused(Fault, "fault.too-few-points", 1):
        log_log_slope(BOOT, x[:1], columns[:1])


def test_slope_trusts_the_precise_points():
    rng = np.random.default_rng(1)
    x = np.array([0.01, 0.1, 1.0])
    scatter = (0.01, 0.01, 3.0)
    columns = [make(s**2 * np.exp(z * rng.standard_normal((32, 1)))) for s, z in zip(x, scatter, strict=True)]
    assert log_log_slope(BOOT, x, columns).value == pytest.approx(2, abs=0.05)

"""The interval of a difference, made of two intervals."""

import math

import numpy as np
import pytest

from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.independent import difference

BOOT = Bootstrap(resamples=1000, confidence=0.95, seed=0)
WINDOWS, TOKENS = 32, 20


def made(value, low, high, windows=32) -> Estimate:
    return Estimate(value, low, high, windows, 20 * windows, "bca")


def wilson(events: int, n: int) -> Estimate:
    """A proportion with Wilson's score interval, 95 %."""
    z, p = 1.959964, events / n
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return made(p, (centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n))


def test_two_proportions_as_published():
    """Newcombe 1998, Statistics in Medicine 17:873, table II (a), method 10: this construction on Wilson's limits."""
    found = difference(wilson(56, 70), wilson(48, 80))
    assert (round(found.low, 4), round(found.high, 4)) == (0.0524, 0.3339)


def test_symmetric_intervals_add_like_standard_errors():
    found = difference(made(3.0, 2.7, 3.3), made(1.0, 0.6, 1.4))
    assert (found.value, found.method) == (2.0, "mover")
    assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(2.5))
    assert found.resolvable == pytest.approx(0.5)


def test_turning_the_difference_round_turns_the_interval_round():
    a, b = made(3.0, 2.9, 3.6), made(1.0, 0.3, 1.1)
    there, back = difference(a, b), difference(b, a)
    assert (back.value, back.low, back.high) == (-there.value, -there.high, -there.low)
    assert there.high - there.value > there.value - there.low  # the long sides are a's upper and b's lower one


def test_the_smaller_run_is_what_it_rests_on():
    assert difference(made(1, 0, 2, 64), made(1, 0, 2, 8)).n_windows == 8
    assert difference(made(1, 0, 2, 8), made(1, 0, 2, 64)).n_tokens == 160


def kl(rng, mean, shared=None) -> Column:
    """Skewed tokens whose windows differ: a lognormal factor of mean 1 times gammas of mean 1."""
    scatter = rng.standard_normal((WINDOWS, 1)) if shared is None else shared
    values = mean * np.exp(0.5 * scatter - 0.125) * rng.gamma(1.0, 1.0, (WINDOWS, TOKENS))
    return Column.of(np.repeat(np.arange(WINDOWS), TOKENS), np.tile(np.arange(TOKENS), WINDOWS), values.ravel())


def coverage(repeats, truth, draw, estimate):
    rng = np.random.default_rng(5)
    found = [estimate(*draw(rng)) for _ in range(repeats)]
    return np.mean([one.low <= truth <= one.high for one in found])


def unpaired(a, b):
    return difference(BOOT.mean(a), BOOT.mean(b))


@pytest.mark.parametrize("means", [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0)])
def test_interval_covers_the_planted_difference(means):
    """Two models on windows of their own, the one more skewed and wider than the other."""

    def draw(rng):
        return kl(rng, means[0]), kl(rng, means[1])

    assert 0.92 <= coverage(400, means[0] - means[1], draw, unpaired) <= 0.985


def test_on_shared_windows_it_covers_too_often_and_pairing_is_as_good_as_it_says():
    def draw(rng):
        shared = rng.standard_normal((WINDOWS, 1))
        return kl(rng, 1.2, shared), kl(rng, 1.0, shared)

    assert coverage(300, 0.2, draw, unpaired) > 0.985
    assert 0.91 <= coverage(300, 0.2, draw, BOOT.difference) <= 0.985

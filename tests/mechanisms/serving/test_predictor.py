"""The predictor of service times: planted coefficients come back, and what was not measured is not invented."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab_mechanisms.serving.predictor import (
    REQUEST,
    STEP,
    Online,
    Unfitted,
    fit,
    request_features,
    step_features,
)
from refusals import refused

pytestmark = pytest.mark.full

PLANTED = np.array([4e-3, 6e-4, 2e-8, 1.5e-3, 3e-10])


def steps(count: int, seed: int = 0) -> np.ndarray:
    chance = np.random.default_rng(seed)
    prefill = chance.integers(0, 512, count)
    decodes = chance.integers(0, 64, count)
    return step_features(
        prefill, prefill * chance.integers(1, 900, count), decodes, decodes * chance.integers(20, 900, count) * 23040
    )


def noisy(x: np.ndarray, share: float = 0.01, seed: int = 1) -> np.ndarray:
    return x @ PLANTED * (1 + share * np.random.default_rng(seed).standard_normal(len(x)))


def test_planted_coefficients_come_back():
    x = steps(6000)
    assert fit(x, noisy(x)).coefficients == pytest.approx(PLANTED, rel=0.1)
    assert fit(x, x @ PLANTED).coefficients == pytest.approx(PLANTED, rel=1e-6)


def test_planted_coefficients_of_requests_come_back_apart():
    chance = np.random.default_rng(3)
    x = request_features(*chance.integers(1, 900, (2, 400)), chance.integers(0, 32, 400), 23040)
    first, after = chance.uniform(1e-4, 1, 6) / x.mean(0), chance.uniform(1e-4, 1, 6) / x.mean(0)
    for planted in (first, after):
        assert fit(x, x @ planted, REQUEST).coefficients == pytest.approx(planted, rel=1e-6)


def test_what_is_not_determined_is_flagged():
    prompt = np.arange(1, 101)
    x = request_features(prompt, prompt, 4, 100.0)  # as many out as in, always four beside
    found = fit(x, x @ np.array([0.1, 1e-3, 1e-6, 2e-3, 1e-9, 0.01]), REQUEST)
    assert {"request", "sequence beside", "prompt token", "output token"} <= set(found.undetermined)
    assert found.predict(request_features(50, 50, 4, 100.0)).determined
    assert not found.predict(request_features(50, 0, 4, 100.0)).determined
    assert not found.predict(request_features(50, 50, 9, 100.0)).determined
    assert fit(steps(100), noisy(steps(100))).undetermined == ()


def test_no_prediction_is_negative():
    x, chance = steps(60), np.random.default_rng(0)
    found = fit(x, np.abs(chance.standard_normal(60)))
    assert (found.seconds(steps(300, seed=9)) >= 0).all()
    assert found.predict(x[0]).low >= 0


def test_the_interval_covers_what_it_says():
    covered = []
    for seed in range(40):
        x = steps(150, seed)
        found, new = fit(x, noisy(x, 0.05, seed), seed=seed), steps(200, seed + 1000)
        covered.append(np.abs(noisy(new, 0.05, seed + 5000) - found.seconds(new)) <= found.half_width)
    assert 0.85 <= np.mean(covered) <= 0.95


def test_units_do_not_matter():
    x = steps(200)
    units = np.array([1.0, 1e3, 1e-4, 7.0, 1e-9])
    one, other = fit(x, noisy(x)), fit(x * units, noisy(x) * 1e3)
    assert other.seconds(x * units) == pytest.approx(1e3 * one.seconds(x), rel=1e-6)
    assert other.half_width == pytest.approx(1e3 * one.half_width, rel=1e-6)


def test_fewer_bits_read_less():
    x = steps(200)
    found = fit(x, x @ PLANTED)
    wide, narrow = (float(found.seconds(step_features(0, 0, 8, 8 * 500 * size))[0]) for size in (23040, 2930))
    assert wide - narrow == pytest.approx(8 * 500 * (23040 - 2930) * PLANTED[4], rel=1e-6)


@pytest.mark.parametrize("count", [0, 3, 9])
def test_too_few_rows_are_no_fit(count):
    with refused(Unfitted, "unfitted.too-few-rows", count, "at least 10"):
        fit(steps(count), np.ones(count))


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_a_number_that_cannot_be_is_refused(bad):
    y = np.ones(30)
    y[4] = bad
    with refused(Unfitted, "unfitted.impossible-number"):
        fit(steps(30), y)


@pytest.mark.parametrize("forgetting", [1.0, 0.97])
def test_the_running_fit_is_the_batch_fit(forgetting):
    x = steps(120)
    y = noisy(x)
    running = Online(STEP, forgetting)
    for row, seconds in zip(x, y, strict=True):
        running.record(row, seconds)
    weight = np.sqrt(forgetting ** np.arange(119, -1, -1.0))
    scale = np.linalg.norm(x, axis=0)
    batch = np.linalg.lstsq(x / scale * weight[:, None], y * weight, rcond=None)[0] / scale
    assert running.coefficients(negative=True) == pytest.approx(batch, rel=1e-5)
    assert (running.coefficients() >= 0).all()


def test_the_running_fit_follows_a_change_and_says_when_it_knows_nothing():
    running = Online(STEP, 0.9)
    with pytest.raises(Unfitted):
        running.predict(steps(1)[0])
    for factor in (1.0, 3.0):
        for row in steps(200):
            running.record(row, factor * float(row @ PLANTED))
    assert running.predict(steps(1)[0]) == pytest.approx(3 * float(steps(1)[0] @ PLANTED), rel=1e-4)
    alike = Online(STEP)
    for _ in range(50):
        alike.record(steps(1)[0], 1.0)
    with refused(Unfitted, "unfitted.undetermined", 50):
        alike.coefficients()


def test_a_row_is_the_same_as_numbers_and_as_an_array_and_has_its_length():
    x = steps(600)
    found = fit(x, noisy(x))
    assert found.predict(tuple(x[3].tolist())) == found.predict(x[3]) == found.predict(x[3:4])
    assert found.predict(x[3]).value == pytest.approx(float(x[3] @ found.coefficients), rel=1e-12)
    with refused(Unfitted, "unfitted.row-length", 4, 5):
        found.predict(x[3, :4])

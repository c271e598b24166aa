from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from kvlab.stats.bootstrap import Bootstrap, Column
from validation.planted import coverage
from validation.planted.coverage import DISTRIBUTIONS, FactorLaw, Statistic, Table, measure, share, statistics
from validation.planted.ground import window_column

BLOCK, KLT, _ = DISTRIBUTIONS


@pytest.mark.parametrize("law", [FactorLaw("gamma", 2.5), FactorLaw("gamma", 0.75), FactorLaw("lognormal", 0.8)])
def test_factors_have_mean_one_and_share_their_scatter(law):
    drawn = law.draw(np.random.default_rng(0), (400, 100), 2)
    assert drawn.mean((1, 2)) == pytest.approx([1, 1], abs=0.03)
    assert (drawn > 0).all()
    a, b = drawn.reshape(2, -1)
    assert 0.6 < np.corrcoef(a, b)[0, 1] < 0.9


def test_truths_are_those_of_large_tables():
    """Every statistic's truth against one table with many windows: the estimate is within its own interval."""
    table = Table(replace(KLT, tokens=FactorLaw("gamma", 4.0)), np.random.default_rng(1), 500)
    boot = Bootstrap(200, 0.9999, 0)
    for statistic in statistics():
        found = statistic.estimate(boot, table)
        assert found.low <= statistic.truth <= found.high, statistic.name
        assert found.resolvable < max(abs(statistic.truth), coverage.MEAN_KL), statistic.name


def test_intervals_cover():
    for entry in measure(KLT, 12, repeats=60):
        assert entry["coverage"]["low"] <= 0.96 and entry["coverage"]["value"] > 0.8, entry["statistic"]
        assert entry["below"] + entry["above"] + round(60 * entry["coverage"]["value"]) == 60
        assert not entry["enforced"] and coverage.holds(entry)


def test_an_interval_that_is_too_narrow_is_found_out(monkeypatch):
    """Tokens taken as if they were independent: overconfident, and out of the band."""

    def naive(boot: Bootstrap, table: Table):
        column: Column = table.corners[0]
        tokens = window_column(np.repeat(column.means, 20))
        return boot.mean(tokens)

    monkeypatch.setattr(coverage, "RESAMPLES", 200)
    monkeypatch.setattr(coverage, "statistics", lambda: [Statistic("naive", coverage.MEAN_KL, naive)])
    (entry,) = measure(BLOCK, coverage.MANY, repeats=40)
    assert entry["enforced"] and not coverage.holds(entry)
    assert entry["coverage"]["high"] < 0.92


def test_the_band_is_enforced_on_both_sides():
    entry = {"enforced": True, "coverage": {"value": 0.95}}
    assert coverage.holds(entry)
    for value in (0.919, 0.981):
        assert not coverage.holds({"enforced": True, "coverage": {"value": value}})


def test_share_is_clopper_pearson():
    found = share(95, 100)
    assert (found["value"], found["low"], found["high"]) == pytest.approx((0.95, 0.8872, 0.9836), abs=1e-4)
    assert share(0, 10)["low"] == 0 and share(10, 10)["high"] == 1


def test_no_interval_ends_inside_the_t_interval():
    """The guard of `stats.bootstrap.interval`, on the data that it is for."""
    boot = Bootstrap(500, 0.95, 0)
    for seed in range(10):
        table = Table(BLOCK, np.random.default_rng(seed), 16)
        column = table.corners[0]
        half = stdtrit(15, 0.975) * column.means.std(ddof=1) / 4
        found = boot.mean(column)
        assert found.low <= found.value - half * (1 - 1e-12) and found.high >= found.value + half * (1 - 1e-12)

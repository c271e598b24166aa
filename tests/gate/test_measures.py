import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import xlogy
from scipy.stats import binomtest

from kvlab.core.errors import MixedIdentity, NonFinite
from kvlab.gate.evidence.measures import (
    BOOTSTRAP,
    LEVELS,
    bounds_of,
    carried,
    change_bounds,
    measured,
    paired,
    rate_se,
)
from kvlab.stats.bootstrap import Column
from kvlab.stats.skewed import upper_means
from refusals import refused

NOMINAL = 0.025
SHARES = (0.002, 0.01, 0.05, 0.2, 0.45)


def hits(n, k):
    return (np.arange(n) < k).astype(float)


def tails(n, gained, lost):
    """Exact chances that the interval of the change lies above, or below, the true one."""
    up, down = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    possible = up + down <= n
    up, down = up[possible], down[possible]
    log_factorial = np.cumsum(np.log(np.maximum(np.arange(n + 1), 1)))
    same = n - up - down
    log_p = log_factorial[n] - log_factorial[up] - log_factorial[down] - log_factorial[same]
    p = np.exp(log_p + xlogy(up, gained) + xlogy(down, lost) + xlogy(same, 1 - gained - lost))
    low, high = change_bounds(up, down, n)
    return p[low > gained - lost].sum(), p[high < gained - lost].sum()


@pytest.mark.parametrize("n", [20, 100])
@pytest.mark.parametrize("gained", (0.0, *SHARES))
def test_either_end_is_wrong_at_most_at_the_nominal_rate(n, gained):
    for lost in SHARES:
        above, below = tails(n, gained, lost)
        assert above <= NOMINAL and below <= NOMINAL


def test_the_interval_is_not_needlessly_wide():
    above, below = tails(200, 0.2, 0.2)
    assert above > NOMINAL / 2 and below > NOMINAL / 2


def test_a_rate_has_the_exact_interval():
    for k in (0, 1, 37, 99, 100):
        exact = binomtest(k, 100).proportion_ci(0.95)
        assert measured(hits(100, k)).model_dump(exclude={"lows", "highs", "gained", "lost"}) == pytest.approx(
            {"value": k / 100, "low": exact.low, "high": exact.high, "se": rate_se(k, 100), "n": 100}
        )


def test_the_bounds_contain_the_interval_and_widen():
    variant, baseline = np.random.default_rng(5).gamma(1.0, 0.01, (2, 60))
    found = paired(variant, baseline)
    assert found.lows[0] <= found.low and found.high <= found.highs[0] and len(found.lows) == len(carried(60))
    assert list(found.lows) == sorted(found.lows, reverse=True) and list(found.highs) == sorted(found.highs)
    same = paired(variant, variant, rate=False)
    assert set(same.highs) == {0.0} and len(same.highs) == len(carried(60))  # nothing changed, nothing is lost


def test_the_ends_of_a_rate_follow_from_its_counts_at_any_level():
    variant, baseline = (np.random.default_rng(5).random((2, 60)) < 0.8).astype(float)
    found = paired(variant, baseline)
    assert found.lows == () and found.gained - found.lost == round(found.value * 60)
    lows, highs = bounds_of(found, LEVELS)
    assert (lows[0], highs[0]) == (found.low, found.high) and len(lows) == len(LEVELS)
    assert (np.diff(lows) <= 0).all() and (np.diff(highs) >= 0).all()
    assert bounds_of(measured(variant))[0] == pytest.approx([measured(variant).low])


@pytest.mark.parametrize(("n", "least"), [(2, None), (31, None), (32, 25 / 1024), (64, 25 / 4096), (400, 25 / 160000)])
def test_few_items_carry_no_small_p(n, least):
    levels = carried(n)
    if least is None:
        assert levels == ()
    else:
        assert levels[0] == NOMINAL and least <= levels[-1] < least * 2**0.5
    assert len(paired(np.arange(1.0, n + 1), np.zeros(n), rate=False).highs) == len(levels)


@pytest.mark.parametrize(("n", "sd"), [(32, 0.5), (32, 0.8), (32, 1.28), (64, 1.28), (100, 1.28)])
def test_the_bound_of_a_skewed_loss_is_too_low_as_rarely_as_said(n, sd):
    """Lognormal windows, of which the bootstrap is too low in 4 to 12 % of the draws; at every level that n carry."""
    rng, draws = np.random.default_rng([n, round(100 * sd)]), 2000
    highs = np.array([upper_means(rng.lognormal(0, sd, n), carried(n)) for _ in range(draws)])
    missed = (highs < math.exp(sd**2 / 2)).mean(0)
    for found, level in zip(missed, carried(n), strict=True):
        assert found <= level + 3 * math.sqrt(level * (1 - level) / draws)


def test_the_bound_of_a_mean_is_andersons():
    """By hand: of four values the smallest half is put where the largest possible one lies."""
    level = math.exp(-2)  # moves sqrt(2 / 8) = a half
    (found,) = upper_means([4.0, 1.0, 3.0, 2.0], [level])
    assert found == pytest.approx((3 + 4) / 4 + 0.5 * (4 + 1.5))


def test_without_a_single_miss_nothing_is_certain():
    perfect = measured(hits(100, 100))
    assert (
        perfect.high == 1.0 and perfect.low == pytest.approx(0.0025 ** (0.5 / 100) * 1.0, abs=0.03) and perfect.se > 0
    )
    same = paired(hits(100, 90), hits(100, 90))
    assert same.value == 0 and -same.low == same.high == pytest.approx(1 - NOMINAL**0.01)


def test_pairing_gains_where_few_items_change():
    baseline = hits(500, 450)
    variant = baseline.copy()
    variant[:5], variant[495:] = 0, 1
    together, shuffled = paired(variant, baseline), paired(np.roll(variant, 250), baseline)
    assert together.value == pytest.approx(shuffled.value) == 0
    assert together.high - together.low < (shuffled.high - shuffled.low) / 2


@given(st.integers(0, 60), st.integers(0, 60), st.integers(2, 200))
def test_bounds_hold_their_value_and_turn_with_their_sign(gained, lost, more):
    n = gained + lost + more
    low, high = change_bounds(gained, lost, n)
    assert -1 <= low <= (gained - lost) / n <= high <= 1
    turned_low, turned_high = change_bounds(lost, gained, n)
    assert (turned_low, turned_high) == pytest.approx((-high, -low))


def test_all_items_changed_is_no_division_by_zero():
    low, high = change_bounds(50, 0, 50)
    assert 0.8 < low < 1 and high == 1


def test_other_scores_go_through_the_bootstrap():
    rng = np.random.default_rng(5)
    baseline, variant = rng.normal(1.0, 1.0, (2, 40))
    found = paired(variant, baseline)
    columns = [Column.of(np.arange(40), np.zeros(40), scores) for scores in (variant, baseline)]
    expected = BOOTSTRAP.difference(*columns)
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))
    assert found.se == pytest.approx(np.std(variant - baseline, ddof=1) / 40**0.5)


def test_what_changes_nothing_token_by_token_is_certain_and_ten_right_answers_are_not():
    nothing = np.zeros(10)
    assert paired(nothing, nothing, rate=False).high == 0 < paired(nothing, nothing).high
    assert measured(nothing + 1, rate=False).low == 1 > measured(nothing + 1).low
    with refused(NonFinite, "non-finite.rate"):
        measured(nothing + 1.5, rate=True)


@pytest.mark.parametrize("scores", [[], [1.0, float("nan")], [[1.0, 0.0]]])
def test_what_is_no_row_of_scores_is_refused(scores):
    with refused(NonFinite, "non-finite.scores"):
        measured(scores)


def test_other_items_are_not_paired():
    with refused(MixedIdentity, None, "items: 3 | 4"):
        paired(np.ones(3), np.ones(4))

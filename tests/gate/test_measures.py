import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import xlogy
from scipy.stats import binomtest

from kvlab.base.errors import MixedIdentity, NonFinite
from kvlab.gate.evidence.measures import BOOTSTRAP, LEVELS, Measure, change_bounds, measured, paired, rate_se
from kvlab.stats.bootstrap import Column

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
        assert measured(hits(100, k)).model_dump(exclude={"lows", "highs"}) == pytest.approx(
            {"value": k / 100, "low": exact.low, "high": exact.high, "se": rate_se(k, 100), "n": 100}
        )


@pytest.mark.parametrize("rate", [True, False])
def test_the_ends_at_stricter_levels_are_the_intervals_at_these_confidences(rate):
    """Made by the same method: the first is the printed one, and each later one is wider."""
    rng = np.random.default_rng(5)
    variant, baseline = (rng.random((2, 60)) < 0.8).astype(float) if rate else rng.gamma(1.0, 0.01, (2, 60))
    found = paired(variant, baseline, rate)
    assert (found.low, found.high) == (found.lows[0], found.highs[0]) and len(found.lows) == len(LEVELS)
    assert list(found.lows) == sorted(found.lows, reverse=True) and list(found.highs) == sorted(found.highs)
    for level, low, high in zip(LEVELS, found.lows, found.highs, strict=True):
        again = paired(variant, baseline, rate, levels=(level,))
        assert (low, high) == pytest.approx((again.low, again.high))
    assert paired(variant, baseline, rate, LEVELS[:1]).lows == ()


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
    baseline, variant = rng.exponential(1.0, (2, 40))
    found = paired(variant, baseline)
    columns = [Column.of(np.arange(40), np.zeros(40), scores) for scores in (variant, baseline)]
    expected = BOOTSTRAP.difference(*columns)
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))
    assert found.se == pytest.approx(np.std(variant - baseline, ddof=1) / 40**0.5)
    assert Measure.of_estimate(expected).se == pytest.approx(found.se, rel=0.2)


def test_what_changes_nothing_token_by_token_is_certain_and_ten_right_answers_are_not():
    nothing = np.zeros(10)
    assert paired(nothing, nothing, rate=False).high == 0 < paired(nothing, nothing).high
    assert measured(nothing + 1, rate=False).low == 1 > measured(nothing + 1).low
    with pytest.raises(NonFinite, match="from 0 to 1"):
        measured(nothing + 1.5, rate=True)


@pytest.mark.parametrize("scores", [[], [1.0, float("nan")], [[1.0, 0.0]]])
def test_what_is_no_row_of_scores_is_refused(scores):
    with pytest.raises(NonFinite, match="one per item"):
        measured(scores)


def test_other_items_are_not_paired():
    with pytest.raises(MixedIdentity, match=r"items: 3 \| 4"):
        paired(np.ones(3), np.ones(4))

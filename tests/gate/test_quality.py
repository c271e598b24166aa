import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlab.gate.evidence.measures import Measure, measured, paired
from kvlab.gate.evidence.quality import judge, tolerance
from kvlab.gate.registry.entries import Metric


def metric(direction="lower", tolerance_se=2.0, tolerance_max=0.5, floor=None):
    limits = {"tolerance_se": tolerance_se, "tolerance_max": tolerance_max, "floor": floor}
    return Metric(key="m", direction=direction, **limits)


def measure(low, high, value=None, se=0.0625, n=100):
    return Measure(value=(low + high) / 2 if value is None else value, low=low, high=high, se=se, n=n)


BASELINE = measure(0.25, 0.5)  # two standard errors are 0.125
VALUE = measure(0.25, 0.75)


def word(low, high, **options):
    """The word on a loss from `low` to `high`, of either direction."""
    found = judge(metric(**options), BASELINE, measure(low, high), VALUE)
    turned = judge(metric(**options | {"direction": "higher"}), BASELINE, measure(-high, -low), VALUE)
    assert (turned.word, turned.loss, turned.low, turned.high, turned.needed_n) == (
        found.word,
        found.loss,
        found.low,
        found.high,
        found.needed_n,
    )
    return found.word


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.25, 0.0625, "within"),
        (-0.5, -0.25, "within"),  # better
        (0.0625, 0.125, "within"),  # the tolerance itself is allowed
        (0.0, 0.1250001, "open"),
        (-0.5, 0.5, "open"),
        (0.125, 0.25, "open"),
        (0.1250001, 0.25, "beyond"),
        (0.75, 1.0, "beyond"),
    ],
)
def test_bounds_decide(low, high, expected):
    assert word(low, high) == expected


def test_the_cap_binds_an_eval_that_is_too_small():
    assert word(0.0625, 0.125, tolerance_max=0.0625) == "open"
    assert word(0.078125, 0.125, tolerance_max=0.0625) == "beyond"


def test_a_baseline_without_noise_is_held_to_the_cap_alone():
    exact = measure(0.0, 0.0, se=0.0)
    assert judge(metric(tolerance_se=None), exact, measure(0.25, 0.5), VALUE).word == "within"
    assert judge(metric(tolerance_se=2.0), exact, measure(0.25, 0.5), VALUE).word == "beyond"


def test_the_variants_own_scatter_forgives_nothing():
    """With many damaged items the variant's standard error grows; what is allowed stays the baseline's."""
    baseline = np.ones(400)
    baseline[:8] = 0
    variant = baseline.copy()
    variant[200:280] = 0
    found = judge(metric("higher"), measured(baseline), paired(variant, baseline), measured(variant))
    assert measured(variant).se > 2 * measured(baseline).se
    assert found.tolerance == 2 * measured(baseline).se and found.word == "beyond"


@pytest.mark.parametrize(
    ("direction", "low", "high", "loss", "expected", "margin"),
    [
        ("higher", 0.5, 0.75, (-0.125, 0.0625), "within", 0.0),
        ("higher", 0.25, 0.75, (-0.125, 0.0625), "open", -0.25),
        ("higher", 0.25, 0.375, (-0.125, 0.0625), "beyond", -0.25),
        ("higher", 0.5, 0.75, (0.25, 0.5), "beyond", 0.0),
        ("lower", 0.25, 0.5, (-0.125, 0.0625), "within", 0.0),
        ("lower", 0.25, 0.75, (-0.125, 0.0625), "open", -0.25),
        ("lower", 0.625, 0.75, (-0.125, 0.0625), "beyond", -0.25),
    ],
)
def test_the_floor_is_met_by_the_whole_interval(direction, low, high, loss, expected, margin):
    ends = loss if direction == "lower" else (-loss[1], -loss[0])
    found = judge(metric(direction, floor=0.5), BASELINE, measure(*ends), measure(low, high))
    assert (found.word, found.margin) == (expected, margin)


def test_without_a_baseline_the_floor_decides_alone():
    alone = judge(metric("higher", floor=0.5), None, None, measure(0.5, 0.75))
    assert (alone.word, alone.tolerance, alone.loss, alone.low, alone.high) == ("within", None, None, None, None)
    nothing = judge(metric("higher"), None, None, measure(0.5, 0.75))
    assert (nothing.word, nothing.needed_n) == ("open", None)


@pytest.mark.parametrize("missed", [0, 1, 3])
@pytest.mark.parametrize("n", [183, 200, 1000, 10_000])
def test_an_unchanged_variant_can_be_shown_to_lose_nothing(n, missed):
    """Even where the baseline misses nothing; the cap of 0.02 needs 183 items."""
    scores = np.ones(n)
    scores[:missed] = 0
    parts = measured(scores), paired(scores, scores), measured(scores)
    assert judge(metric("higher", tolerance_max=0.02), *parts).word == "within"
    assert judge(metric("higher", tolerance_max=0.0199, tolerance_se=None), *parts).word == ("within", "open")[n == 183]


def test_too_few_standard_errors_are_out_of_reach_at_a_perfect_baseline():
    perfect = np.ones(1000)
    found = judge(metric("higher", tolerance_se=1.9), measured(perfect), paired(perfect, perfect), measured(perfect))
    assert (found.word, found.needed_n) == ("open", None)


# ------------------------------------------------------------------------------- what would settle it


def with_items(found, n):
    """The same value over `n` items."""
    shrink = math.sqrt(found.n / n)
    low, high = (found.value + shrink * (end - found.value) for end in (found.low, found.high))
    return Measure(value=found.value, low=low, high=high, se=shrink * found.se, n=n)


def words_at(given_metric, parts, n):
    return judge(given_metric, *(with_items(part, n) for part in parts)).word


def test_more_items_reach_the_cap():
    open_one = judge(metric(tolerance_se=None, tolerance_max=0.25), BASELINE, measure(-0.375, 0.625), VALUE)
    assert open_one.needed_n == pytest.approx(100 * (0.5 / 0.125) ** 2, abs=1)


def test_without_a_loss_more_items_do_not_help_where_noise_is_the_limit():
    """Interval and tolerance shrink alike."""
    found = judge(metric(), BASELINE, measure(-0.25, 0.25), VALUE)
    assert (found.word, found.needed_n) == ("open", None)


def test_a_small_real_loss_ends_beyond_a_shrinking_tolerance():
    parts = (BASELINE, measure(-0.0625, 0.1875, 0.0625), VALUE)
    found = judge(metric(), *parts)
    assert found.word == "open" and found.needed_n == pytest.approx(100 * (0.25 / 0.0625) ** 2, abs=1)
    assert words_at(metric(), parts, found.needed_n) == "beyond"


SIDE = st.floats(0.001, 1)
LIMIT = st.one_of(st.none(), st.floats(0.1, 5))


@given(st.floats(-1, 1), SIDE, SIDE, LIMIT, st.floats(0.001, 1), SIDE, st.one_of(st.none(), st.floats(0, 1)))
def test_needed_items_settle_an_open_word_and_fewer_do_not(loss, below, above, in_se, cap, se, floor):
    given_metric = metric("lower", in_se, cap, floor)
    parts = (measure(0.0, 4 * se, se=se), measure(loss - below, loss + above, loss), measure(0.3, 0.7))
    found = judge(given_metric, *parts)
    assume(found.word == "open")
    if found.needed_n is None:
        assert all(words_at(given_metric, parts, 100 * 4**k) == "open" for k in range(1, 8))
        return
    assert words_at(given_metric, parts, found.needed_n) != "open"
    steps = np.unique(np.geomspace(100, found.needed_n - 1, 7).astype(int))
    assert all(words_at(given_metric, parts, int(n)) == "open" for n in steps if n < found.needed_n - 1)


@given(st.floats(-1, 1), SIDE, SIDE, LIMIT, st.floats(0.001, 1), st.floats(0, 1))
def test_more_loss_never_earns_a_better_word(loss, below, above, in_se, cap, more):
    order = ("within", "open", "beyond")
    found = [
        order.index(judge(metric("lower", in_se, cap), BASELINE, measure(at - below, at + above, at), VALUE).word)
        for at in (loss, loss + more)
    ]
    assert found[0] <= found[1]


def test_impossible_distances_are_no_number():
    found = judge(metric(tolerance_max=0.125), BASELINE, measure(-1e200, 1e200, 0.125), measure(0, 1e300))
    assert (found.word, found.needed_n) == ("open", None)


def test_tolerance_is_elementwise():
    assert tolerance(metric(), np.array([0.125, 1.0])).tolist() == [0.25, 0.5]
    assert tolerance(metric(tolerance_se=None), np.array([0.0, 1.0])).tolist() == [0.5, 0.5]

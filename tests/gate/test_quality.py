import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.stats import binom

from kvlab.gate.evidence.measures import ALPHA, FEWEST, LEVELS, Measure, carried, change_bounds, measured, paired
from kvlab.gate.evidence.quality import NOT_INSIDE, judge
from kvlab.gate.registry.entries import Metric
from kvlab.stats.multiple import holm


def metric(direction="lower", margin=0.125, floor=None, rate=False):
    return Metric(key="m", direction=direction, margin=margin, floor=floor, rate=rate, unit="nats", why="made up")


def measure(low, high, value=None, se=0.0625, n=100):
    """A mean whose bounds are its interval."""
    ends = {"low": low, "high": high, "lows": (low,), "highs": (high,)}
    return Measure(value=(low + high) / 2 if value is None else value, se=se, n=n, **ends)


VALUE = measure(0.25, 0.75)


def word(low, high, **options):
    """The word on a loss from `low` to `high`, of either direction."""
    found = judge(metric(**options), measure(low, high), VALUE)
    turned = judge(metric(**options | {"direction": "higher"}), measure(-high, -low), VALUE)
    assert (turned.word, turned.loss, turned.low, turned.high, turned.needed_n, turned.p) == (
        found.word,
        found.loss,
        found.low,
        found.high,
        found.needed_n,
        found.p,
    )
    return found.word


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.25, 0.0625, "within"),
        (-0.5, -0.25, "within"),  # better
        (0.0625, 0.125, "within"),  # the margin itself is allowed
        (0.0, 0.1250001, "open"),
        (-0.5, 0.5, "open"),
        (0.125, 0.25, "open"),
        (0.1250001, 0.25, "beyond"),
        (0.75, 1.0, "beyond"),
    ],
)
def test_bounds_decide(low, high, expected):
    assert word(low, high) == expected


@pytest.mark.parametrize("se", [0.0, 1e-9, 0.5])
@pytest.mark.parametrize("n", [2, 100, 10**6])
def test_the_margin_hangs_on_nothing_but_the_registry(se, n):
    found = judge(metric(), measure(0.0625, 0.125, se=se, n=n), measure(0.25, 0.75, se=se, n=n))
    assert (found.margin, found.word) == (0.125, "within")


# ------------------------------------------------------- more items and the same true loss


def passing(n, loss, margin=0.05):
    """The chance that an eval of `n` items is within, where each is lost with a chance of `loss`; exact."""
    lost = np.arange(n + 1)
    given_metric, inside = metric("higher", margin, rate=True), -change_bounds(0, lost, n)[0] <= margin
    edge = int(inside.sum())  # within up to so many: then the judge says so too
    for count in {edge - 1, edge} & set(range(n + 1)):
        variant = (np.arange(n) >= count).astype(float)
        found = judge(given_metric, paired(variant, np.ones(n), True), measured(variant, True))
        assert (found.word == "within") == bool(inside[count])
    return float(binom.cdf(edge - 1, n, loss)) if edge else 0.0


GROWING = (100, 200, 400, 800, 1600, 3200, 6400)


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.02, 0.03, 0.04])
def test_a_true_loss_inside_the_margin_passes_the_more_often_the_more_items_there_are(loss):
    rates = [passing(n, loss) for n in GROWING]
    assert all(b > a - 1e-12 for a, b in pairwise(rates)) and rates[-1] > 0.9


@pytest.mark.parametrize("loss", [0.07, 0.08, 0.15])
def test_a_true_loss_outside_the_margin_passes_the_more_rarely_the_more_items_there_are(loss):
    rates = [passing(n, loss) for n in GROWING]
    assert all(b < a + 1e-12 for a, b in pairwise(rates)) and rates[0] < ALPHA


@given(st.floats(-1, 0.12), st.floats(0.001, 1), st.integers(2, 200))
def test_the_same_loss_is_never_worse_because_there_are_more_items(loss, side, factor):
    """A loss inside the margin: with the interval that `factor` times the items have."""
    few = judge(metric(), measure(loss - side, loss + side, loss), VALUE)
    shrunk = side / math.sqrt(factor)
    many = judge(metric(), measure(loss - shrunk, loss + shrunk, loss, n=100 * factor), VALUE)
    order = ("within", "open", "beyond")
    assert order.index(many.word) <= order.index(few.word) and "beyond" not in (many.word, few.word)


# ------------------------------------------------------------------------ p-values and families


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([60, 200, 400]), st.sampled_from([None, 0.5]))
def test_p_is_at_most_alpha_where_the_printed_interval_is_inside_and_nowhere_else(lost, gained, n, floor):
    baseline = (np.arange(n) < 0.8 * n).astype(float)
    variant = baseline.copy()
    variant[:lost], variant[n - gained :] = 0, 1
    found = judge(metric("higher", 0.05, floor, rate=True), paired(variant, baseline), measured(variant))
    assert (found.p <= ALPHA) == (found.word == "within") and found.p in (*LEVELS, NOT_INSIDE)


def test_p_is_the_smallest_level_whose_interval_is_inside():
    scores = np.random.default_rng(3).gamma(2.0, 0.004, 40)
    change, value = paired(scores, 0 * scores, False), measured(scores, False)
    assert change.lows[0] <= change.low and change.high <= change.highs[0]
    assert LEVELS[: len(change.highs)] == carried(40)
    for level, end in zip(carried(40), change.highs, strict=True):
        assert judge(metric(margin=end), change, value).p <= level
        assert judge(metric(margin=end * (1 - 1e-9)), change, value).p > level
    alone = change.model_copy(update={"lows": (), "highs": ()})
    found = judge(metric(margin=1.0), alone, value)  # so few items that nothing bounds their mean
    assert (found.word, found.p, found.needed_n) == ("open", NOT_INSIDE, FEWEST)


def test_the_p_of_a_rate_that_loses_nothing_is_the_binomial_one_rounded_up():
    for n in (80, 120, 160):
        same = np.ones(n)
        p = judge(metric("higher", 0.05, rate=True), paired(same, same), measured(same)).p
        exact = 0.95**n
        assert exact <= p < max(exact, LEVELS[-1]) * math.sqrt(2) * (1 + 1e-9)


@pytest.mark.parametrize("shared", [0, 200, 400])
def test_with_all_rows_at_the_margin_any_certification_is_as_rare_as_said(shared):
    """Items answered or not: each of 20 rows truly loses exactly the margin, of `shared` items all rows the same."""
    n, rows, repeats, margin = 400, 20, 2000, 0.05
    p_of = {}
    for lost in range(60):
        variant = (np.arange(n) >= lost).astype(float)
        p_of[lost] = judge(metric("higher", margin, rate=True), paired(variant, np.ones(n)), measured(variant)).p
    rng = np.random.default_rng(0)
    drawn = rng.binomial(shared, margin, (repeats, 1)) + rng.binomial(n - shared, margin, (repeats, rows))
    p_values = np.vectorize(lambda lost: p_of.get(lost, NOT_INSIDE))(drawn)
    alone = (p_values <= ALPHA).any(1).mean()
    together = np.mean([(holm(row) <= ALPHA).any() for row in p_values])
    spread = 3 * math.sqrt(ALPHA * (1 - ALPHA) / repeats)
    assert together <= ALPHA + spread
    if shared < n:  # otherwise all rows are one and the same, and there is nothing to adjust for
        assert together > 0 and alone > 5 * ALPHA


# --------------------------------------------------------------------------------- the floor


@pytest.mark.parametrize(
    ("direction", "low", "high", "loss", "expected", "room"),
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
def test_the_floor_is_met_by_the_whole_interval(direction, low, high, loss, expected, room):
    ends = loss if direction == "lower" else (-loss[1], -loss[0])
    found = judge(metric(direction, floor=0.5), measure(*ends), measure(low, high))
    assert (found.word, found.room) == (expected, room)
    assert (found.p <= ALPHA) == (expected == "within")


def test_without_a_baseline_the_floor_decides_alone():
    alone = judge(metric("higher", floor=0.5), None, measure(0.5, 0.75))
    assert (alone.word, alone.margin, alone.loss, alone.low, alone.high) == ("within", None, None, None, None)
    nothing = judge(metric("higher"), None, measure(0.5, 0.75))
    assert (nothing.word, nothing.needed_n) == ("open", None)


@pytest.mark.parametrize("missed", [0, 1, 3])
@pytest.mark.parametrize("n", [183, 200, 1000, 10_000])
def test_an_unchanged_variant_can_be_shown_to_lose_nothing(n, missed):
    """Even where the baseline misses nothing; a margin of 0.02 needs 183 items."""
    scores = np.ones(n)
    scores[:missed] = 0
    parts = paired(scores, scores), measured(scores)
    assert judge(metric("higher", 0.02, rate=True), *parts).word == "within"
    assert judge(metric("higher", 0.0199, rate=True), *parts).word == ("within", "open")[n == 183]


# ------------------------------------------------------------------------------- what would settle it


def with_items(part, n):
    """The same value with the interval that n items would have."""
    shrink = math.sqrt(part.n / n)
    ends = (part.value - shrink * (part.value - part.low), part.value + shrink * (part.high - part.value))
    return measure(*ends, part.value, n=n)


def words_at(given_metric, parts, n):
    return judge(given_metric, *(with_items(part, n) for part in parts)).word


def test_more_items_reach_the_margin():
    open_one = judge(metric(margin=0.25), measure(-0.375, 0.625), VALUE)
    assert open_one.needed_n == pytest.approx(100 * (0.5 / 0.125) ** 2, abs=1)


def test_a_mean_of_so_few_items_certifies_nothing():
    open_one = judge(metric(margin=0.25), measure(-0.0625, 0.3125, 0.125, n=8), VALUE)
    assert (open_one.word, open_one.needed_n) == ("open", FEWEST)


def test_a_loss_outside_the_margin_ends_beyond_it():
    parts = (measure(0.0, 0.375, 0.1875), VALUE)
    found = judge(metric(), *parts)
    assert found.word == "open" and found.needed_n == pytest.approx(100 * (0.1875 / 0.0625) ** 2, abs=1)
    assert words_at(metric(), parts, found.needed_n) == "beyond"


def test_a_loss_that_is_the_margin_is_settled_by_no_number():
    found = judge(metric(), measure(0.0, 0.25), VALUE)
    assert (found.loss, found.word, found.needed_n) == (0.125, "open", None)


SIDE = st.floats(0.001, 1)


@example(0.0, 1.0, 1.0, 1.0, 0.49)
@given(st.floats(-1, 1), SIDE, SIDE, st.floats(0.001, 1), st.one_of(st.none(), st.floats(0, 1)))
def test_needed_items_settle_an_open_word_and_fewer_do_not(loss, below, above, margin, floor):
    given_metric = metric("lower", margin, floor)
    parts = (measure(loss - below, loss + above, loss), measure(0.3, 0.7))
    found = judge(given_metric, *parts)
    assume(found.word == "open")
    if found.needed_n is None:
        assert all(words_at(given_metric, parts, 100 * 4**k) == "open" for k in range(1, 8))
        return
    settled = {words_at(given_metric, parts, found.needed_n + more) for more in (0, 1)}
    assert settled != {"open"}  # one more, where an end meets its limit at a whole number and rounding decides
    steps = np.unique(np.geomspace(100, found.needed_n - 1, 7).astype(int))
    assert all(words_at(given_metric, parts, int(n)) == "open" for n in steps if n < found.needed_n - 1)


@given(st.floats(-1, 1), SIDE, SIDE, st.floats(0.001, 1), st.floats(0, 1))
def test_more_loss_never_earns_a_better_word(loss, below, above, margin, more):
    order = ("within", "open", "beyond")
    found = [
        order.index(judge(metric("lower", margin), measure(at - below, at + above, at), VALUE).word)
        for at in (loss, loss + more)
    ]
    assert found[0] <= found[1]


def test_impossible_distances_are_no_number():
    found = judge(metric(), measure(-1e200, 1e200, 0.125), measure(0, 1e300))
    assert (found.word, found.needed_n) == ("open", None)

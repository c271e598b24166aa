import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import UserError
from kvlab.gate.evidence.measures import measured, paired
from kvlab.gate.evidence.quality import judge
from kvlab.gate.registry import load
from kvlab.gate.registry.entries import Metric
from refusals import refused
from tiers import examples
from validation.gate.power import NOMINAL, detection_curve, false_alarm, items_needed, repeated, words

SAID = {"unit": "share of items", "why": "made up"}
RECALL = Metric(key="recall", direction="higher", margin=0.05, floor=0.2, rate=True, **SAID)
# so little allowed that the rate is that of the interval's end alone
HARDEST = Metric(key="recall", direction="higher", margin=1e-9, rate=True, **SAID)


@pytest.mark.parametrize("n", [100, 200, 500, 1000])
@pytest.mark.parametrize("chance", [0.5, 0.9, 0.98])
def test_the_baseline_against_itself_is_seldom_beyond(n, chance):
    found = false_alarm(RECALL, np.full(n, chance))
    assert found["rate"] <= found["nominal"] == NOMINAL and found["low"] <= found["rate"] <= found["high"]


@pytest.mark.parametrize("n", [100, 500])
def test_the_rate_is_nominal_even_where_next_to_nothing_is_allowed(n):
    found = false_alarm(HARDEST, np.full(n, 0.9), resamples=20_000)
    assert 0.01 < found["rate"] <= NOMINAL


def test_every_shipped_metric_of_the_kind_has_no_more_false_alarms():
    kinds = [m for entry in load().evals.values() for m in entry.metrics if m.direction == "higher"]
    chances = np.random.default_rng(1).beta(9, 1, 300)
    assert len(kinds) >= 5
    assert all(false_alarm(m, chances)["rate"] <= NOMINAL for m in kinds)


def test_items_that_are_always_answered_alike_never_differ():
    assert false_alarm(HARDEST, [1.0] * 90 + [0.0] * 10)["beyond"] == 0


def test_planted_losses_are_found_with_enough_items():
    rates = {(row["loss"], row["n_items"]): row for row in detection_curve(RECALL)}
    assert len(rates) == 16
    for row in rates.values():
        assert row["within"] + row["open"] + row["beyond"] == pytest.approx(1)
    for n in (100, 200, 500, 1000):
        assert rates[0.0, n]["beyond"] <= NOMINAL
        assert rates[0.05, n]["within"] <= NOMINAL and rates[0.1, n]["within"] <= NOMINAL  # at or above the margin
        found = [rates[loss, n]["beyond"] for loss in (0.0, 0.02, 0.05, 0.1)]
        assert found == sorted(found)
    found = [rates[0.1, n]["beyond"] for n in (100, 200, 500, 1000)]
    assert found == sorted(found) and found[-1] > 0.95
    assert all(rates[0.05, n]["beyond"] <= 0.05 for n in (100, 200, 500, 1000))  # no more than the margin is no fault
    for loss in (0.0, 0.02):
        found = [rates[loss, n]["within"] for n in (100, 200, 500, 1000)]
        assert found == sorted(found) and found[-1] > 0.9


def test_a_table_is_the_same_every_time_and_its_rows_stand_alone():
    assert detection_curve(RECALL) == detection_curve(RECALL)
    assert detection_curve(RECALL, losses=(0.05,), n_items=(200,)) == [
        row for row in detection_curve(RECALL) if (row["loss"], row["n_items"]) == (0.05, 200)
    ]
    assert detection_curve(RECALL, seed=1) != detection_curve(RECALL)


def test_items_needed_are_on_the_curve():
    n = items_needed(RECALL, 0.1, "beyond")
    assert detection_curve(RECALL, (0.1,), (n,))[0]["beyond"] >= 0.8
    assert 100 < n < 500
    assert items_needed(RECALL, 0.0, "beyond", most=2000) is None
    assert items_needed(RECALL, 0.0, "within") < items_needed(RECALL, 0.02, "within") < 2000


@examples(60)
@given(
    st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(0, 20), st.integers(0, 30)).filter(
        lambda c: sum(c) > 1
    ),
    st.sampled_from((0.02, 0.1, 0.3)),
    st.sampled_from((None, 0.2, 0.7)),
)
def test_words_are_those_of_the_gate(counts, margin, floor):
    """What is played here is the rule that rows are judged by, on the items themselves."""
    metric = Metric(key="recall", direction="higher", margin=margin, floor=floor, rate=True, **SAID)
    kept, lost, gained, _ = counts
    baseline = np.repeat([1.0, 1.0, 0.0, 0.0], counts)
    variant = np.repeat([1.0, 0.0, 1.0, 0.0], counts)
    expected = judge(metric, paired(variant, baseline), measured(variant)).word
    found = words(metric, np.array([kept + lost]), np.array([gained]), np.array([lost]), sum(counts))
    assert [word for word, given_it in found.items() if given_it[0]] == [expected]


@pytest.mark.parametrize("items", [[], [1.5], [float("nan")], [[0.5]]])
def test_chances_are_chances(items):
    with refused(UserError, "user.no-chances"):
        false_alarm(RECALL, items)


def test_what_cannot_be_planted_is_refused():
    with refused(UserError, "user.impossible-loss", 0.95):
        detection_curve(RECALL, losses=(0.95,))
    with refused(UserError, "user.direction", "kl"):
        detection_curve(Metric(key="kl", direction="lower", margin=0.1, **SAID))


def test_a_baseline_scored_twice_is_judged_as_its_items_are():
    rng = np.random.default_rng(0)
    first = (rng.random(200) < 0.9).astype(float)
    assert repeated(RECALL, first, first, rate=True) == {"within": 200, "open": 0, "beyond": 0}
    lost = first.copy()
    lost[:60] = 0
    assert repeated(RECALL, lost, first, rate=True)["beyond"] == 200
    kl = Metric(key="kl", direction="lower", margin=0.01, **SAID)
    assert repeated(kl, np.zeros(32), np.zeros(32), rate=False) == {"within": 200, "open": 0, "beyond": 0}
    assert repeated(kl, np.full(32, 0.5), np.zeros(32), rate=False)["beyond"] == 200
    near = repeated(kl, 0.01 + 0.01 * rng.standard_normal(32), np.zeros(32), rate=False, resamples=40)
    assert sum(near.values()) == 40 and near["open"] > 0

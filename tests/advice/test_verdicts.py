"""The rule of verdicts on planted intervals, and the choice among planted settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.advice import choice
from kvlab.advice.choice import LossWish, Setting
from kvlab.advice.serving import CacheFormat
from kvlab.advice.verdicts import BROKEN, CLASSES, LOSSES, OPEN, answer, bound, verdict
from kvlab.stats.bootstrap import Estimate


def kl(low: float, high: float | None = None) -> Estimate:
    """An interval, in its middle the value."""
    high = low if high is None else high
    return Estimate((low + high) / 2, low, high, 8, 1000, "t")


PLANTED = [  # ends of the interval, the floor, the verdict and what else it may be
    ((0.0, 0.0013), 0.0, "safe", ("safe",)),
    ((0.002, 0.010), 0.0, "small", ("small",)),
    ((0.011, 0.10), 0.0, "noticeable", ("noticeable",)),
    ((0.11, 9.0), 0.0, BROKEN, (BROKEN,)),
    ((0.0013, 0.0014), 0.0, OPEN, ("safe", "small")),
    ((0.001, 5.0), 0.0, OPEN, CLASSES),
    ((0.001, 0.002), 0.003, "safe", ("safe",)),  # 16 bits cost this model as much
    ((0.02, 0.03), 0.05, "noticeable", ("noticeable",)),  # but no floor makes it safe
    ((bound("small"), bound("small")), 0.0, "noticeable", ("noticeable",)),  # an end belongs to the worse class
]


@pytest.mark.parametrize(("ends", "floor", "word", "possible"), PLANTED)
def test_a_planted_interval_has_its_verdict(ends, floor, word, possible):
    assert verdict(kl(*ends), floor) == (word, possible)


def test_the_documentation_has_the_bounds_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "recommend.md").read_text()
    for loss in LOSSES:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| *{loss}* |")]
        assert f"below {bound(loss)}" in line


intervals = st.tuples(st.floats(0, 2), st.floats(0, 2)).map(lambda ends: kl(*sorted(ends)))


@given(intervals, st.floats(0, 1), st.sampled_from(LOSSES))
def test_answers_are_those_of_the_verdict(found, floor, loss):
    said = verdict(found, floor)
    allowed = CLASSES[: CLASSES.index(loss) + 1]
    inside = {one in allowed for one in said.possible}
    assert answer(found, loss, floor) == ("yes" if inside == {True} else "no" if inside == {False} else OPEN)
    assert (said.word == OPEN) == (len(said.possible) > 1)


@given(intervals, st.floats(0, 1))
def test_a_wider_interval_says_no_more(found, floor):
    wider = kl(found.low / 2, found.high * 2)
    assert set(verdict(found, floor).possible) <= set(verdict(wider, floor).possible)


def setting(name: str, bits: float, *exact: int, apart: bool = False) -> Setting:
    return Setting(CacheFormat(name, apart=apart), exact, bits)


EIGHT, FOUR, OTHER_FOUR, TWO = setting("a", 8.5), setting("b", 4.5), setting("c", 4.5), setting("d", 2.5)
FOUND = {EIGHT: kl(1e-4, 2e-4), FOUR: kl(0.004, 0.009), OTHER_FOUR: kl(0.003, 0.006), TWO: kl(0.2, 0.4)}


@pytest.mark.parametrize(
    ("wish", "taken"),
    [
        (LossWish("safe"), EIGHT),
        (LossWish("small"), OTHER_FOUR),  # of equal bits that of the least upper end
        (LossWish("noticeable"), OTHER_FOUR),
        (LossWish(bits=3), TWO),
        (LossWish(bits=4.5), OTHER_FOUR),
        (LossWish(bits=2), None),
    ],
)
def test_the_choice_among_planted_settings(wish, taken):
    assert choice.choose(FOUND, wish, 0.0) == taken


def test_what_looks_best_over_a_finished_cache_is_measured_as_it_is_read_before_it_is_taken():
    asked = []
    truth = {OTHER_FOUR: kl(0.02, 0.03), FOUR: kl(0.005, 0.01), EIGHT: kl(1e-4, 2e-4)}

    def as_read(open_: dict[str, Setting]) -> dict[str, Estimate]:
        asked.append(open_)
        return {name: truth[one] for name, one in open_.items()}

    found = {"one": dict(FOUND), "two": {EIGHT: FOUND[EIGHT]}, "none": {TWO: FOUND[TWO]}}
    assert choice.settled(found, as_read, LossWish("small"), 0.0) == {"one": FOUR, "two": EIGHT, "none": None}
    assert asked == [{"one": OTHER_FOUR, "two": EIGHT}, {"one": FOUR}]  # together; nothing twice or in vain


def test_layers_are_looked_for_where_they_could_save_bits():
    apart = {setting(name, bits, apart=True): kl(value) for name, bits, value in (("x", 4.5, 0.5), ("y", 4.5, 0.05))}
    close = choice.worth_layers(FOUND | apart, EIGHT, LossWish("small"), 28)
    assert [one.name for one in close] == ["y", "x"]
    assert choice.worth_layers(FOUND | apart, FOUR, LossWish("small"), 28) == []  # no bits to be saved
    assert choice.worth_layers(FOUND | apart, EIGHT, LossWish(bits=5), 28) == []


def test_the_layers_that_carry_the_loss_are_the_worst_ones():
    losses = dict.fromkeys(range(28), 1e-4) | {0: 3.0, 27: 1.0, 5: 0.5, 9: 0.4}
    assert choice.carriers(losses)[:3] == [(0,), (0, 27), (0, 5, 9, 27)]
    assert choice.carriers({0: 1.0, 1: 2.0, 2: 0.5}) == [(1,)]
    whole, exact = setting("x", 4.0), Setting(CacheFormat("x"), (1,), choice.bits_per_value(4.0, 1, 3))
    assert choice.stored_bytes(whole, [8, 8, 8]) == 12
    assert choice.stored_bytes(exact, [8, 8, 8]) == 4 + 16 + 4
    assert choice.stored_bytes(exact, [100, 8, 100]) == 50 + 16 + 50  # the one in 16 bits has a window
    assert choice.bits_per_value(4.0, 2, 28) == pytest.approx((26 * 4 + 2 * 16) / 28)

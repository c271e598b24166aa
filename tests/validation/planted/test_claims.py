import numpy as np
import pytest

from kvlab.stats.bootstrap import Bootstrap
from validation.planted.claims import Claim, at_least, contained, exactly, recover, together, up_to
from validation.planted.ground import window_column

BOOT = Bootstrap(1000, 0.95, 0)
COLUMN = window_column(np.random.default_rng(0).normal(1.0, 0.1, 32))


def mean(planted):
    return Claim("case", "mean", "", planted, lambda boot: boot.mean(COLUMN))


def test_intervals_hold_together():
    claims = [mean(1.0)] * 10 + [up_to("case", "rounded", "", 0.0, 0.0, 0.0)]
    assert together(BOOT, claims).confidence == pytest.approx(1 - 0.05 / 10)
    assert together(BOOT, []).confidence == BOOT.confidence
    alone, among = recover(BOOT, claims[:1])[0], recover(BOOT, claims)[0]
    assert among.estimate.resolvable > 1.2 * alone.estimate.resolvable


def test_a_wrong_value_is_not_recovered():
    right, wrong = recover(BOOT, [mean(1.0), mean(1.2)])
    assert right.holds and right.alone
    assert not wrong.holds and not wrong.alone
    assert wrong.to_json()["holds"] is False and wrong.to_json()["planted"] == 1.2


def test_just_outside_alone_may_be_inside_together():
    edge = BOOT.mean(COLUMN).high + 0.1 * BOOT.mean(COLUMN).resolvable
    (found,) = [one for one in recover(BOOT, [mean(edge)] + [mean(1.0)] * 20) if one.claim.planted == edge]
    assert found.holds and not found.alone


def test_what_has_to_be_exact():
    zero, off = window_column([0.0, 0.0, 0.0]), window_column([0.0, 0.0, 1e-12])
    assert recover(BOOT, [exactly("case", "zero", "", 0.0, zero)])[0].holds
    assert not recover(BOOT, [exactly("case", "zero", "", 0.0, window_column([1e-12, 1e-12]))])[0].holds
    assert recover(BOOT, [exactly("case", "range", "", 0.0, off)])[0].estimate.high == 1e-12


def test_bounds_and_roundings():
    claims = [at_least("c", "n", "", 10.0, 11.0), at_least("c", "n", "", 10.0, 9.0)]
    claims += [up_to("c", "n", "", 1.0, 1.1, 0.2), up_to("c", "n", "", 1.0, 1.3, 0.2)]
    assert [one.holds for one in recover(BOOT, claims)] == [True, False, True, False]


def test_too_few_values_inside_plain_intervals_fail_a_path():
    found = [("a", True)] * 19 + [("a", False)] + [("b", True)] * 5 + [("b", False)] * 5
    a, b, everything = contained(found, 0.95)
    assert (a["path"], a["values"], a["inside"], a["expected"], a["holds"]) == ("a", 20, 19, [17, 20], True)
    assert (b["inside"], b["holds"]) == (5, False)  # a binomial of 10 and 0.95 is at most 5 once in 10 000 times
    assert (everything["values"], everything["inside"]) == (30, 24)

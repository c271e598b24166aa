import math
from dataclasses import replace

import numpy as np
import pytest

from kvlab.codecs.shared import quantizer
from kvlab.stats.bootstrap import Bootstrap
from validation.planted import sources
from validation.planted.claims import recover

BOOT = Bootstrap(1000, 0.95, 0)


@pytest.fixture(scope="module")
def case():
    return sources.case()


def test_the_truth_by_other_means():
    assert sources.least_distortion(1) == pytest.approx(1 - 2 / math.pi, rel=1e-9)
    for bits in range(1, 7):
        assert sources.least_distortion(bits) == pytest.approx(quantizer.mse(quantizer.gaussian_table(bits)), rel=1e-7)
    white = np.ones(4)
    assert sources.distortion_at(white, 2.0) == pytest.approx(2**-4)
    assert sources.rate_at(white, 2**-4) == pytest.approx(2.0)
    flooded = np.array([4.0, 1e-3])  # one component under water
    assert sources.distortion_at(flooded, 0.5) == pytest.approx((1.0 + 1e-3) / 2)


def test_bits_go_where_they_help():
    assert sources.spent_error(np.array([16.0, 1.0]), 0) == pytest.approx(8.5)
    assert sources.spent_error(np.array([16.0, 1.0]), 1) == pytest.approx((16 * (1 - 2 / math.pi) + 1) / 2)


def test_every_value_is_recovered(case):
    assert [one.claim.name for one in recover(BOOT, case.claims) if not one.holds] == []


def test_wrong_values_are_not(case):
    off = [replace(claim, planted=1.05 * claim.planted) for claim in case.claims]
    held = [one.claim.name for one in recover(BOOT, off) if one.holds]
    assert all("bits above" in name or "klt" in name for name in held)
    assert len(held) < len(off) / 4


def test_a_worse_table_is_found_out(monkeypatch):
    table = quantizer.gaussian_table
    monkeypatch.setattr(quantizer, "gaussian_table", lambda bits: 1.15 * table(bits))
    held = [one.holds for one in recover(BOOT, sources.scalar())]
    assert not any(held)

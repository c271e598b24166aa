"""What every study's tables are made of."""

from __future__ import annotations

from kvlab.core.errors import Fault
from kvlab.output.format import estimate
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.studies.table import Table, spread
from refusals import refused


def test_a_ragged_table_is_no_table():
    assert Table("t", "", ("a", "b"), (("1", "2"),)).rows == (("1", "2"),)
    with refused(Fault, "fault.ragged-table", 3, 2):
        Table("t", "", ("a", "b"), (("1", "2"), ("1", "2", "3")))


def test_what_is_not_there_is_a_dash():
    assert estimate(None) == "–" and spread([]) == ("–", "–", "–")


def test_an_interval_ends_where_the_quantity_does():
    found = Estimate(0.95, 0.8, 1.1, 12, 99, "bca").within(0.0, 1.0)
    assert (found.value, found.low, found.high) == (0.95, 0.8, 1.0)
    assert estimate(found, 100) == "95 [80, 100]"
    assert estimate(found, signed=True) == "+0.95 [+0.80, +1.00]"


def test_the_median_of_an_even_number_lies_between():
    assert spread([4.0, 1.0, 3.0, 2.0]) == ("1.00", "2.50", "4.00")
    assert spread([2.0]) == ("2.00", "2.00", "2.00")

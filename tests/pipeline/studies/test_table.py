"""What every study's tables are made of."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.output.format import estimate
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.rendering import tables

FOUND = Estimate(0.95, 0.8, 1.1, 12, 99, "bca").within(0.0, 1.0)


def test_a_table_is_its_rows_under_their_headings():
    rows = [
        {"name": "a", "kl": FOUND.to_json(), "of": {"k": 3, "v": None}},
        {"name": None, "kl": None, "of": {"k": 1, "v": 2.5}},
    ]
    columns = {
        "who": tables.code("name"),
        "KL": tables.estimate("kl"),
        "share, %": tables.percent("kl"),
        "K": tables.number("of.k"),
        "V": tables.number("of.v"),
        "reading": tables.effect("kl"),
    }
    assert tables.table(rows, columns).splitlines() == [
        "| who | KL | share, % | K | V | reading |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        "| `a` | 0.95 [0.80, 1.00] | 95 [80, 100] | 3 | – | clear of zero |",
        "| – | – | – | 1 | 2.50 | – |",
    ]
    assert tables.table_if_any([], columns) is None


def test_rows_are_read_once_and_may_be_records():
    def rows() -> Iterator[Estimate]:
        yield FOUND

    assert tables.table_if_any(rows(), {"n": tables.number("n_windows")}) == "| n |\n| ---: |\n| 12 |"


def test_an_interval_ends_where_the_quantity_does():
    assert (FOUND.value, FOUND.low, FOUND.high) == (0.95, 0.8, 1.0)
    assert estimate(FOUND, 100) == "95 [80, 100]" and estimate(None) == "–"
    assert estimate(FOUND, signed=True) == "+0.95 [+0.80, +1.00]"

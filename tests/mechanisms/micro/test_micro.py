"""The micro-benchmark: rows that are checked before they are timed, and a page that says what failed."""

from __future__ import annotations

import pytest

from kvlab_mechanisms.micro import page, timing
from kvlab_mechanisms.micro import page as run
from kvlab_mechanisms.micro.row import BenchRow, hold, published
from kvlab_mechanisms.micro.rows import ALL

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def rows():
    return [row for make in ALL for row in make()]


def test_the_published_rows_are_all_there():
    assert sorted(published()) == [f"r{number:02d}" for number in range(1, 64)]


def test_all_published_rows_are_there(rows):
    assert {row.seed for row in rows} == published().keys()


def test_a_row_that_is_slower_without_a_reason_is_named():
    slow = {"kind": "time", "id": "r10", "note": "", "rival": "x", "shape": "", "ours_us": 9.0, "rival_us": 1.0}
    line = page.counts([slow | {"ratio": [0.1, 0.1, 0.1]}])[2]
    assert line[-1] == "r10" and line[3] == "0 of 1"
    assert page.counts([slow | {"ratio": [0.1, 0.1, 0.1], "note": "loses: why"}])[2][-1] == "–"


def test_every_row_is_a_published_one_or_its_sibling_and_has_a_rival_or_a_reason(rows):
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert row.seed in published(), row.id
        assert (row.value is None) != (row.ours is None), row.id
        assert row.value or row.rival_name, row.id


def test_ours_does_what_it_should(rows):
    for row in rows:
        if "4096" not in row.id:
            row.check()


def failing() -> None:
    hold(2 == 3, "2 is not 3")


def test_a_row_that_is_wrong_has_no_time_and_stands_on_the_page(tmp_path):
    found = run.run([BenchRow("r10", "one page", failing, ours=lambda: 1 / 0)], rounds=2)
    assert found["rows"][0]["kind"] == "failed"
    page.write(found, tmp_path / "BENCH.md")
    text = (tmp_path / "BENCH.md").read_text()
    assert "r10: 2 is not 3" in text and "0 of 0" in text


def test_the_page_holds_times_numbers_and_what_is_missing(tmp_path):
    asked = [
        BenchRow(
            "r11", "a", lambda: None, ours=lambda: sum(range(999)), rival=lambda: sum(range(99999)), rival_name="a sum"
        ),
        BenchRow("r11-2", "b", lambda: None, ours=lambda: sum(range(9)), rival_name="none: it cannot be had"),
        BenchRow("r12", "c", lambda: None, value=lambda: 0.25),
    ]
    found = run.run(asked, rounds=3)
    kinds = [row["kind"] for row in found["rows"]]
    assert kinds == ["time", "time", "value"]
    assert found["rows"][0]["ratio"][0] > 1
    page.write(found, tmp_path / "BENCH.md")
    text = (tmp_path / "BENCH.md").read_text()
    assert "| 0.25" in text
    assert page.counts(found["rows"])[0] == ["attention, decoding, memory", "2", "1 of 1", "1 of 1", "1 of 1", "–"]
    assert page.counts(found["rows"])[2][0] == "all" and page.counts(found["rows"])[1][1] == "0"
    assert "r10, r13" in text and "none: it cannot be had" in text


def test_a_ratio_is_of_medians_and_its_interval_holds_it():
    rival, ours = timing.Timed((2.0, 4.0, 6.0)), timing.Timed((1.0, 2.0, 3.0))
    value, low, high = timing.ratio(rival, ours)
    assert value == 2 and low <= value <= high
    assert timing.ratio(rival, rival) == (1, 1, 1)


def test_a_short_call_fills_a_round():
    calls = []
    count = timing.repeats(lambda: calls.append(1))
    assert timing.lasted(lambda: calls.append(1), count) > timing.LEAST / 10
    assert count > 100

"""CLUSTER.md: what it says of what was measured."""

from __future__ import annotations

import pytest

from kvlab.core.errors import Fault, NonFinite, UserError
from kvlab.output import format as fmt
from refusals import refused
from validation.cluster import page
from validation.cluster.measure import _recipe

pytestmark = pytest.mark.full


def row(codec: str, nbytes: int, ms: float) -> dict:
    times = {"handover_ms": ms, "prefill_ms": 9.0, "step_ms": 3.0}
    return {"codec": codec, "tokens": 64, "way": "pipe", "bytes": nbytes, "kl": 0.0} | times


FOUND = {
    "model": "m",
    "machine": "a machine",
    "versions": {"torch": "2"},
    "world": 2,
    "collectives": [{"name": "a", "shape": "[1]", "bytes": 8, "formula": 8, "ours_us": 2.0, "theirs_us": 1.0}],
    "handovers": [row("exact", 9_000_000, 5.0), row("int=4", 1_000_000, 9.0)],
    "vllm": {"reason": "vllm is not installed"},
}


def test_the_page_says_what_was_found(tmp_path):
    page.write(FOUND, tmp_path / "CLUSTER.md")
    text = (tmp_path / "CLUSTER.md").read_text()
    assert "Not measured: vllm is not installed." in text and "9,000,000" in text
    ran = FOUND | {"vllm": {"rows": [{"tokens": 64, "bytes": 77, "save_ms": 1.5, "load_ms": 2.5}]}}
    page.write(ran, tmp_path / "CLUSTER.md")
    text = (tmp_path / "CLUSTER.md").read_text()
    assert "Not measured" not in text and "| 64 tokens | 77 | 1.50 | 2.50 |" in text
    with pytest.raises(NonFinite):
        page.write(FOUND | {"handovers": [row("exact", 1, float("nan"))]}, tmp_path / "CLUSTER.md")


def test_a_codec_pays_below_what_it_saves_over_what_it_takes():
    exact, coded = FOUND["handovers"]
    assert page.pays_below(coded, FOUND["handovers"]) == pytest.approx(8e6 / 4e-3 / 1e6)
    assert page.pays_below(exact, FOUND["handovers"]) is None


def test_a_codec_that_is_not_understood_is_told():
    with refused(UserError, "user.codec-not-understood", "'int'", "NAME=BITS"):
        _recipe("int")


def test_a_table_whose_rows_are_not_of_its_headers_is_refused():
    with pytest.raises(Fault) as caught:
        fmt.table(("a", "b"), [("1", "2", "3")])
    assert all(part in str(caught.value) for part in ("2 headers ['a', 'b']", "3 cells"))
    assert fmt.table(("a", "b"), []).count("\n") == 1

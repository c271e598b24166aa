"""Claims: what a sentence must carry, and how an effect that is not resolved is worded."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.report import claims
from kvlab_pipeline.studies.estimates import claim
from refusals import refused

EVIDENCE = re.compile(r"\((\d+) windows, (\d+) tokens; (cells? `\w+`.*) against (cells? `\w+`.*)\)\.$")
SIDES = [[{"cell_id": "a" * 12, "engine": "hf"}], [{"cell_id": "b" * 12, "engine": "hf"}]]


def made(value: float, low: float, high: float, **changes) -> dict:
    effect = {"value": value, "low": low, "high": high, "n_windows": 32, "n_tokens": 4064}
    words = {"about": "gap", "subject": "`x`", "up": "raises KL", "down": "lowers KL", "null": 0.0, "unit": "nats"}
    return words | {"effect": effect, "windows_needed": 71, "compared": SIDES} | changes


@given(low=st.floats(-1, 1), middle=st.floats(0, 1), high=st.floats(-1, 1), null=st.sampled_from([0.0, 1.0]))
def test_every_sentence_carries_its_evidence_and_says_when_nothing_is_resolved(low, middle, high, null):
    low, high = sorted((null + low, null + high))
    one = made(low + middle * (high - low), low, high, null=null)
    words = claims.sentence(one)
    found = EVIDENCE.search(words)
    assert found and found[1] == "32" and found[2] == "4064", words
    assert ("not resolved" in words) == (low <= null <= high)
    assert words.count(".") >= 1 and "\n" not in words


def test_a_direction_is_said_once():
    assert claims.sentence(made(-0.5, -0.6, -0.4)).startswith("`x` lowers KL by 0.50 [0.40, 0.60] nats (32")
    assert claims.sentence(made(0.5, 0.4, 0.6)).startswith("`x` raises KL by 0.50 [0.40, 0.60] nats (32")
    ratio = made(0.5, 0.4, 0.6, null=1.0, unit="times")
    assert claims.sentence(ratio).startswith("`x` lowers KL to 0.50 [0.40, 0.60] times (32")


def test_what_is_not_resolved_says_how_many_windows_it_takes():
    words = claims.sentence(made(0.1, -0.1, 0.3))
    said = "`x`: not resolved, 0.10 [-0.10, 0.30] nats, at most 0.30 either way, about 71 windows needed"
    assert f"{said} (80 % power, post hoc) (32 windows" in words
    assert "no effect is to be seen" in claims.sentence(made(0.0, -0.1, 0.1, windows_needed=None))


def test_many_cells_are_counted():
    many = [[{"cell_id": f"c{i}", "engine": "hf"} for i in range(6)], SIDES[1]]
    assert "6 cells together (`c0` to `c5`) against cell" in claims.sentence(made(1, 0.5, 2, compared=many))


def test_a_claim_compares_two_things():
    effect = Estimate(1.0, 0.5, 1.5, 32, 4064, "bca").to_json()
    for sides in ([], [[], []], [[], [], []]):
        with refused(Fault, "fault.two-sides"):
            claim("gap", "`x`", effect, sides)

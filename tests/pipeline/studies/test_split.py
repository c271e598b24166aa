"""Bits divided between K and V: the divisions, and planted costs found again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import ParamsError
from kvlab_pipeline.report.claims import resolved, sentence
from kvlab_pipeline.report.contexts import report_context
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.studies.settings import Settings
from kvlab_pipeline.studies.split import plan
from kvlab_pipeline.studies.split.chapter import claims
from kvlab_pipeline.studies.split.params import Split
from pipeline.report.synthetic import Effects, small_params, write_results
from refusals import refused


@given(st.integers(2, 16), st.integers(0, 7))
def test_every_division_takes_the_same_bytes_and_the_most_even_one_leads(total, apart):
    pairs = plan.divisions(SimpleNamespace(split=Split(total=total, apart=apart)))
    assert len(set(pairs)) == len(pairs) and {k + v for k, v in pairs} <= {total}
    assert all(1 <= bits <= 8 for pair in pairs for bits in pair)
    uneven = [abs(k - v) for k, v in pairs]
    assert uneven == sorted(uneven)
    assert bool(pairs) == (apart > 0 or total % 2 == 0)


@pytest.mark.parametrize(
    ("split", "data"),
    [
        ({"codec": "fp8"}, ("split.codec is 'fp8'",)),
        ({"total": 5, "apart": 0}, ("split.total is 5", "split.apart is 0")),
        ({"windows": 999}, ("split.windows is 999", "windows.test")),
    ],
)
def test_what_cannot_be_divided_is_refused(split, data):
    with refused(ParamsError, None, *data):
        small_params(split=split)


@pytest.fixture(scope="module")
def params() -> Settings:
    return small_params(split={"windows": 12}, studies=["split"])


@pytest.fixture(scope="module")
def metrics(params, tmp_path_factory) -> dict:
    return build(params, write_results(tmp_path_factory.mktemp("split"), params).sources)


def test_planted_costs_are_found(params, metrics):
    effects, rows = Effects(), metrics["split"]
    assert len(rows) == len(params.engines) * len(plan.divisions(params))
    for row in rows:
        share = {s: effects.base * effects.stream_share[s] * 4.0 ** (3 - row[f"{s}_bits"]) for s in "kv"}
        floor = effects.floor[row["engine"]]
        assert row["kl"]["value"] == pytest.approx(sum(share.values()) - floor, rel=1e-6)
        even = effects.base * sum(effects.stream_share[s] for s in "kv")
        if row["difference"]:
            assert row["difference"]["value"] == pytest.approx(sum(share.values()) - even, rel=1e-6)


def test_a_claim_says_which_division_is_dearer(metrics):
    told = {sentence(claim).split(" in place")[0]: claim for claim in claims(metrics["split"])}
    starved = told["`hadamard` with K at 2 and V at 4 bits"]
    assert resolved(starved) and starved["effect"]["value"] > 0 and "raises KL" in sentence(starved)


def test_the_page_has_its_section(params, metrics):
    context = report_context(params, metrics, {"publishable": True}, None)
    assert "split" in context["sections"] and context["split"]["codec"] == "hadamard"
    assert len(context["claims"]["split"]) == len([row for row in metrics["split"] if row["difference"]])

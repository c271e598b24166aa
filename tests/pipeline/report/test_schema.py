"""The schema of metrics.json: what is published, what is read, what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import MissingResult, StaleResult
from kvlab.core.records import write_json
from kvlab_mechanisms.ledger.contract import ContractBroken
from kvlab_pipeline.cli.contracts import hold
from kvlab_pipeline.rendering.withheld import without_cross_engine
from kvlab_pipeline.report.claims import derived
from kvlab_pipeline.report.digest import with_digest
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.report.schema import VERSION, Metrics, checked, json_schema, load, read
from pipeline.report.synthetic import small_params, write_results
from refusals import refused

PUBLISHED = Path(__file__).parents[3] / "docs" / "metrics.schema.json"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    params = small_params(stats={"resamples": 200})
    return build(params, write_results(tmp_path_factory.mktemp("results"), params).sources)


def test_the_published_schema_is_what_the_models_generate():
    assert json.loads(PUBLISHED.read_text()) == json_schema()


def test_what_is_built_is_read_back_the_same(metrics, tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(metrics))
    assert load(path) == json.loads(json.dumps(metrics))
    assert read(path).cells[0].kl.value == metrics["cells"][0]["kl"]["value"]
    assert metrics["schema_version"] == VERSION and "claims" not in metrics


def test_what_is_built_keeps_its_contract(metrics):
    """That of docs/metrics.schema.json, which `kvlab step metrics` holds it against before it writes it."""
    hold("metrics", metrics, "m.json")
    with refused(ContractBroken, None, "m.json: schema_version", "'3'", VERSION):
        hold("metrics", metrics | {"schema_version": "3"}, "m.json")


@given(version=st.none() | st.integers().filter(lambda n: n != VERSION) | st.text(max_size=5))
def test_another_version_is_refused_in_one_line(version):
    data = ("a.json", "schema_version", "`kvlab step metrics`")
    with refused(MissingResult, "missing-result.other-version", *data) as caught:
        checked({"schema_version": version}, "a.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", sorted(Metrics.model_fields))
def test_a_part_that_is_missing_or_unknown_is_named(metrics, part):
    if part not in ("schema_version",):
        with refused(MissingResult, "missing-result.no-metrics", "a.json", VERSION, f": {part}: Field required"):
            checked({name: value for name, value in metrics.items() if name != part}, "a.json")
    with refused(MissingResult, "missing-result.no-metrics", ": claims: Extra inputs are not permitted"):
        checked(metrics | {"claims": []}, "a.json")


def test_no_claim_is_left_that_compares_engines_when_they_may_not_be(metrics):
    def crossing(claims):
        return [claim for claim in claims if len({cell["engine"] for side in claim["compared"] for cell in side}) > 1]

    assert crossing(derived(metrics))
    kept = derived(without_cross_engine(metrics))
    assert kept and not crossing(kept)


def test_metrics_changed_by_hand_are_refused(metrics, tmp_path):
    path = tmp_path / "metrics.json"
    write_json(path, metrics)
    read(path)
    changed = deepcopy(metrics)
    changed["identity"]["model_hash"] = "f" * 16
    write_json(path, changed)
    with refused(StaleResult, "stale.changed", path):
        read(path)


def test_a_value_outside_its_own_interval_is_refused(metrics, tmp_path):
    path, changed = tmp_path / "metrics.json", deepcopy(metrics)
    changed["gap"]["measures"]["kl"]["gap"]["value"] = 1e6
    write_json(path, with_digest(changed))
    with refused(MissingResult, "missing-result.no-metrics", "gap.measures.kl.gap", "1e+06"):
        read(path)

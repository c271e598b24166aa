"""The schema of metrics.json: what is published, what is read, what is refused."""

from __future__ import annotations

import json
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
from kvlab_pipeline.report.schema import VERSION, Metrics, by_part, checked, filed, json_schema, load, read
from pipeline.report.synthetic import small_params, write_results
from refusals import refused, refused_in_one_line

PUBLISHED = Path(__file__).parents[3] / "docs" / "metrics.schema.json"


def built(folder: Path, **few) -> dict:
    params = small_params(stats={"resamples": 200}, **few)
    return build(params, write_results(folder, params).sources)


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    return built(tmp_path_factory.mktemp("results"))


def test_the_published_schema_is_what_the_models_generate():
    assert json.loads(PUBLISHED.read_text()) == json_schema()


@pytest.fixture(scope="module")
def written(metrics):
    """The file."""
    return filed(metrics)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A file of fewer rows, for what is refused of any."""
    return filed(built(tmp_path_factory.mktemp("few"), studies=["layers"]))


@pytest.mark.full
def test_what_is_built_is_read_back_the_same(metrics, written, tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(written))
    assert load(path) == json.loads(json.dumps(metrics)) == by_part(checked(written, "m.json"))
    assert filed(load(path)) == written
    assert metrics["schema_version"] == VERSION and "claims" not in metrics


def test_the_file_is_one_table_and_a_row_says_what_it_is_about(metrics, written):
    """As a stranger reads it, who knows no study."""
    rows = [row for row in written["estimates"] if (row["part"], row["estimand"]) == ("cells", "kl")]
    found = {row["levels"]["cell_id"]: (row["value"], row["low"], row["high"], row["n_windows"]) for row in rows}
    ends = ("value", "low", "high", "n_windows")
    told = {one["cell_id"]: tuple(one["kl"][end] for end in ends) for one in metrics["cells"]}
    assert found == told and {row["unit"] for row in rows} == {"nats per token"}
    shares = [row for row in written["estimates"] if row["part"] == "gap.measures.parts" and row["estimand"] == "share"]
    of = {(row["levels"]["measure"], row["levels"]["factor"]) for row in shares}
    assert of >= {("kl", "engine"), ("kl", "protocol")}
    cells = written["compared"]
    assert [cells[name]["engine"] for side in shares[0]["cells"] for name in side] == ["vllm", "hf"]


@pytest.mark.full
def test_what_is_built_keeps_its_contract(written, few):
    """That of docs/metrics.schema.json, which `kvlab step metrics` holds it against before it writes it."""
    hold("metrics", written, "m.json")
    with refused(ContractBroken, None, "m.json: schema_version", "'3'", VERSION):
        hold("metrics", few | {"schema_version": "3"}, "m.json")


@given(version=st.none() | st.integers().filter(lambda n: n != VERSION) | st.text(max_size=5))
def test_another_version_is_refused_in_one_line(version):
    data = ("a.json", "schema_version", "`kvlab step metrics`")
    with refused_in_one_line(MissingResult, "missing-result.other-version", *data):
        checked({"schema_version": version}, "a.json")


@pytest.mark.parametrize("part", sorted(Metrics.model_fields))
def test_a_part_that_is_missing_or_unknown_is_named(few, part):
    if part not in ("schema_version",):
        with refused(MissingResult, "missing-result.no-metrics", "a.json", VERSION, f": {part}: Field required"):
            checked({name: value for name, value in few.items() if name != part}, "a.json")
    with refused(MissingResult, "missing-result.no-metrics", ": claims: Extra inputs are not permitted"):
        checked(few | {"claims": []}, "a.json")


def test_no_claim_is_left_that_compares_engines_when_they_may_not_be(metrics):
    def crossing(claims):
        return [claim for claim in claims if len({cell["engine"] for side in claim["compared"] for cell in side}) > 1]

    assert crossing(derived(metrics))
    kept = derived(without_cross_engine(metrics))
    assert kept and not crossing(kept)


def test_metrics_changed_by_hand_are_refused(few, tmp_path):
    path = tmp_path / "metrics.json"
    write_json(path, few)
    read(path)
    write_json(path, few | {"identity": few["identity"] | {"model_hash": "f" * 16}})
    with refused(StaleResult, "stale.changed", path):
        read(path)


def changed_row(written, part, estimand, columns):
    """The file with other columns in the first row of an estimand, its digest made anew."""
    rows = list(written["estimates"])
    place = next(n for n, row in enumerate(rows) if (row["part"], row["estimand"]) == (part, estimand))
    rows[place] = rows[place] | columns
    return with_digest(written | {"estimates": rows})


def test_a_value_outside_its_own_interval_is_refused(few, tmp_path):
    path = tmp_path / "metrics.json"
    write_json(path, changed_row(few, "gap.measures", "gap", {"value": 1e6}))
    with refused(MissingResult, "missing-result.no-metrics", "estimates.", "1e+06"):
        read(path)


@pytest.mark.parametrize(
    ("part", "estimand", "columns", "code"),
    [
        ("agreement", "windows_needed", {"verdict": "same"}, "stale.verdict"),
        ("cells", "kl", {"estimand": "kl_net"}, "stale.other-rows"),
        ("cells", "kl", {"part": "cellars"}, "stale.parts"),
        ("baseline", "kl", {"levels": {}}, "stale.levels"),
        ("gap.measures", "gap", {"levels": {"measure": "kl"}}, "stale.twice"),
    ],
)
def test_a_table_that_no_study_writes_is_refused(few, tmp_path, part, estimand, columns, code):
    path = tmp_path / "metrics.json"
    write_json(path, changed_row(few, part, estimand, columns))
    with refused(StaleResult, code):
        load(path)


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_probability_is_one(few, value):
    with refused(MissingResult, "missing-result.no-metrics", "no probability"):
        checked(changed_row(few, "layers", "p_value", {"value": value}), "a.json")

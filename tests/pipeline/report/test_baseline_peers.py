"""The engines against each other in one dtype: planted distances come back, other references are refused."""

from __future__ import annotations

import math
import shutil

import polars as pl
import pytest

from kvlab.core.errors import MissingResult, StaleResult
from kvlab.core.records import BaselineCell, read_baseline, read_json, read_tokens, write_json
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.rendering.templates import render
from kvlab_pipeline.studies.baseline import chapter as baseline_tables
from kvlab_pipeline.studies.baseline.numbers import baseline_entry, peer_entries
from kvlab_pipeline.studies.gather import read_baselines
from kvlab_pipeline.studies.measured import Results
from pipeline.report.example_metrics import Maker
from pipeline.report.example_studies import peer_rows
from pipeline.report.synthetic import Effects, Text, small_params, with_table, write_baseline
from refusals import refused

RUN, PEER = "vllm-bfloat16-default", "hf-bfloat16-sdpa"
KL = 0.02  # large enough that some top tokens change
BOOT = Bootstrap(400, 0.95, 0)


def written(folder, params) -> list:
    effects = Effects(cross_peer=KL)
    return write_baseline(folder, params, effects, Text(params, effects))


def collected(params, paths) -> Results:
    runs, tokens = read_baselines(params, paths)
    return Results((), runs, tokens, next(iter(runs.values())).provenance)


@pytest.fixture(scope="module")
def params():
    return small_params()


@pytest.fixture(scope="module")
def whole(params, tmp_path_factory):
    return written(tmp_path_factory.mktemp("whole"), params)


@pytest.fixture
def paths(whole, tmp_path):
    """A copy of the planted runs that a test may spoil, by run."""
    shutil.copytree(whole[0].parent, tmp_path, dirs_exist_ok=True)
    return {path.stem: tmp_path / path.name for path in whole}


def forge(path, index: int, cell: BaselineCell | None) -> None:
    """Put another comparison, or none, in the place of one, rows and all."""
    record, table = read_json(path), read_tokens(path.with_suffix(".parquet"))
    old = record["cells"].pop(index)["cell_id"]
    if cell is None:
        table = table.filter(pl.col("cell_id") != old)
    else:
        record["cells"].insert(index, cell.model_dump())
        table = table.with_columns(pl.col("cell_id").replace(old, cell.cell_id))
    write_json(path, record)
    with_table(path, table)


def test_the_planted_distance_comes_back(params, whole):
    results = collected(params, whole)
    (row,) = peer_entries(params, results, BOOT)
    assert set(row) == {"run", "against", "dtype", "kl", "ppl_ratio", "top1_agreement"}
    assert (row["run"], row["against"], row["dtype"]) == (RUN, PEER, "bfloat16")
    assert row["kl"]["value"] == pytest.approx(KL) and row["kl"]["low"] < KL < row["kl"]["high"]
    assert row["ppl_ratio"]["value"] == pytest.approx(math.exp(Effects.nll_per_kl * KL))
    assert 0.9 < row["top1_agreement"]["value"] < 1
    truth = baseline_entry(results, BOOT, RUN)
    assert truth["kl"]["value"] == pytest.approx(10 * Effects().floor["vllm"])  # not the peer's rows


@pytest.mark.parametrize(
    "changes", [{"engines": ("hf",)}, {"engines": ("vllm",)}, {"hf_attention": ("eager",)}, {"dtypes": ("float32",)}]
)
def test_no_peer_no_rows(params, changes, tmp_path):
    engines = changes.get("engines", params.engines)
    baseline = params.baseline.model_copy(update={k: v for k, v in changes.items() if k != "engines"})
    params = params.model_copy(update={"engines": engines, "baseline": baseline})
    results = collected(params, written(tmp_path, params))
    assert peer_entries(params, results, BOOT) == []
    assert not any(what == "peer" for _, what, _ in results.run_tokens)


def test_a_run_measured_without_its_peer_is_named(params, paths):
    forge(paths[RUN], 1, None)
    results = collected(params, paths.values())
    with refused(MissingResult, "missing-result.comparison", RUN, "'peer'"):
        peer_entries(params, results, BOOT)


@pytest.mark.parametrize("reference", ["hf-bfloat16-eager", "truth"])
def test_a_peer_of_another_run_is_refused(params, paths, reference):
    """Its id is right for what it says; what it says is not the plan."""
    forge(paths[RUN], 1, BaselineCell.of(RUN, "vllm", "bfloat16", "default", "peer", None, reference))
    with refused(StaleResult, "stale.other-reference", f"'{reference}'", f"'{PEER}'"):
        read_baselines(params, paths.values())


def test_a_peer_that_is_not_planned_is_refused(params, paths):
    with refused(StaleResult, "stale.no-reference", f"'{PEER}'"):
        read_baselines(small_params(baseline={"hf_attention": ["eager"]}), [paths["hf-float32-eager"], paths[RUN]])


def test_a_peer_passed_off_as_the_truth_is_refused(params, paths):
    forge(paths[RUN], 0, BaselineCell.of(RUN, "vllm", "bfloat16", "default", "plain", None, PEER))
    with refused(StaleResult, "stale.other-reference", "'plain'", "'truth'"):
        read_baselines(params, paths.values())


def test_a_forged_id_is_refused(params, paths):
    cell = read_baseline(paths[RUN])[0].cells[1]
    forge(paths[RUN], 1, cell.model_copy(update={"cell_id": "f" * 12}))
    with refused(StaleResult, "stale.forged-id", "f" * 12):
        read_baselines(params, paths.values())


def test_the_table_prints_the_row(params, whole):
    (row,) = rows = peer_entries(params, collected(params, whole), BOOT)
    line = baseline_tables.peers(rows).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *(f"`{RUN}`", f"`{PEER}`", "`bfloat16`"),
        fmt.estimate(row["kl"]),
        fmt.estimate(row["ppl_ratio"], 100, 1),
        fmt.estimate(row["top1_agreement"], 100),
    ]


def section(peers: dict | None) -> str:
    given = {"baseline": {"table": "TRUTH", "basis": "FIRST"}, "withheld": None, "figures": {"baseline": None}}
    return render("baseline.md.j2", **given, floor=None, peers=peers)


def test_the_section_has_them_only_when_they_were_measured():
    title = "### The engines against each other, in one dtype"
    rows = peer_rows(Maker(3), ("hf", "vllm"))
    table = baseline_tables.peers(rows)
    text = section({"table": table, "basis": "SECOND"})
    assert text.index("FIRST") < text.index(title) < text.index(table.strip()) < text.index("SECOND")
    assert title not in section(None)
    assert peer_rows(Maker(3), ("hf",)) == []


def test_made_up_rows_have_the_shape_of_measured_ones(params, whole):
    (measured,) = peer_entries(params, collected(params, whole), BOOT)
    (made_up,) = peer_rows(Maker(3), ("hf", "vllm"))
    assert set(made_up) == set(measured)

"""kill_rules, recompute and cost: that what they look for is seen. No Snakemake, no engine."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from pathlib import Path

import polars as pl
import psutil
import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = (ROOT / "workflow" / "scripts", ROOT / "validation" / "pipeline")


def load(name: str, monkeypatch):
    for folder in SCRIPTS:
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


@pytest.fixture
def outcome(monkeypatch):
    return load("outcome", monkeypatch)


@pytest.fixture
def kill_rules(monkeypatch):
    return load("kill_rules", monkeypatch)


@pytest.fixture
def recompute(monkeypatch):
    return load("recompute", monkeypatch)


@pytest.fixture
def cost(monkeypatch):
    return load("cost", monkeypatch)


@pytest.fixture
def tokens() -> pl.DataFrame:
    keys = {"cell_id": ["a"] * 4 + ["b"] * 4, "window": [0, 0, 1, 1] * 2, "position": [64, 65] * 4}
    return pl.DataFrame(keys | {"kl": [0.1 + 0.01 * i for i in range(8)], "protocol": ["snapshot", None] * 4})


def changed(tokens: pl.DataFrame) -> pl.DataFrame:
    one_bit_more = tokens["kl"].to_numpy().copy()
    one_bit_more[3] += 2**-55
    return tokens.with_columns(kl=one_bit_more)


def test_results_that_hold_seconds_have_to_be_there_and_may_differ(outcome, tmp_path):
    for name in ("results/mechanisms/m/hf.json", "results/mechanisms/m/hf.txt", "results/gate/GATE.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("12 tokens/s")
    before = outcome.hashes(tmp_path)
    for name in before:
        (tmp_path / name).write_text("13 tokens/s")
    (tmp_path / "results/gate/GATE.md").unlink()
    found = outcome.differences(before, outcome.hashes(tmp_path))
    assert found == ["lost: results/gate/GATE.md", "other: results/mechanisms/m/hf.txt"]


@pytest.mark.parametrize(
    "spoil",
    [
        changed,
        lambda tokens: tokens.head(-1),
        lambda tokens: pl.concat([tokens, tokens.tail(1)]),
        lambda tokens: tokens.reverse(),
        lambda tokens: tokens.drop("kl"),
        lambda tokens: tokens.rename({"kl": "nll"}),
        lambda tokens: tokens.cast({"window": pl.Int32}),
        lambda tokens: tokens.with_columns(pl.col("protocol").fill_null("")),
    ],
    ids=["value", "lost row", "row twice", "order", "lost column", "other name", "other type", "null"],
)
def test_any_change_of_a_table_is_seen(outcome, tokens, spoil):
    assert outcome.table_hash(spoil(tokens)) != outcome.table_hash(tokens)


def test_a_table_is_its_content_not_its_bytes(outcome, tokens, tmp_path):
    tokens.write_parquet(tmp_path / "a.parquet", compression="zstd")
    pl.concat([tokens.head(3), tokens.tail(5)], rechunk=False).write_parquet(tmp_path / "b.parquet", compression="lz4")
    assert (tmp_path / "a.parquet").read_bytes() != (tmp_path / "b.parquet").read_bytes()
    assert outcome.file_hash(tmp_path / "a.parquet") == outcome.file_hash(tmp_path / "b.parquet")


@pytest.fixture
def place(tokens, tmp_path) -> Path:
    for name in ("calib/sigma/m/hf.json", "results/logs/cells/m/x.log", "results/benchmarks/cells/m/x.tsv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "results" / "cells" / "m").mkdir(parents=True)
    tokens.write_parquet(tmp_path / "results/cells/m/x.parquet")
    return tmp_path


def test_lost_new_and_other_files_are_told_apart(outcome, place):
    before = outcome.hashes(place)
    assert sorted(before) == ["calib/sigma/m/hf.json", "results/cells/m/x.parquet"]
    assert outcome.differences(before, outcome.hashes(place)) == []
    (place / "calib/sigma/m/hf.json").write_text("{ }")
    (place / "results/cells/m/x.parquet").rename(place / "results/cells/m/y.parquet")
    lines = ["lost: results/cells/m/x.parquet", "new: results/cells/m/y.parquet", "other: calib/sigma/m/hf.json"]
    assert outcome.differences(before, outcome.hashes(place)) == lines


def test_what_a_killed_writer_leaves_is_found_and_is_no_result(outcome, kill_rules, place):
    before = outcome.hashes(place)
    assert outcome.temporaries(place) == set()
    left = {"calib/sigma/m/.tmpTbKYnD", "results/cells/m/.x.parquet.4711.tmp", "results/cells/m/.y.json.1.tmp"}
    for name in left:
        (place / name).touch()
    (place / "results/cells/m/.y.json.1.tmp").unlink()
    (place / "results/cells/m/.y.json.1.tmp").mkdir()
    assert outcome.temporaries(place) == left and outcome.hashes(place) == before
    kill_rules.sweep(place)
    assert outcome.temporaries(place) == set() and outcome.hashes(place) == before


def test_a_row_or_a_cell_twice_is_counted(outcome, place, tokens):
    tables = outcome.token_tables(place)
    assert list(tables) == ["results/cells/m/x.parquet"] and outcome.miscounted(tables) == []
    doubled = {"x": pl.concat([tokens, tokens.tail(2)])}
    assert outcome.miscounted(doubled) == ["x: 2 rows more than once"]
    shared = {"x": tokens, "y": tokens.filter(pl.col("cell_id") == "b")}
    assert outcome.miscounted(shared) == ["cell b is in x and in y"]


def test_every_rule_is_killed_before_one_is_killed_again(kill_rules):
    drawn = kill_rules.decks(random.Random(3), ["corpus", "cells", "report"], 8)
    assert len(drawn) == 8
    assert {*drawn[:3]} == {*drawn[3:6]} == {"corpus", "cells", "report"}


def test_a_whole_tree_dies(kill_rules):
    tree = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", tree], **pipes) as parent:
        parent.stdout.readline()
        family = kill_rules.family(psutil.Process(parent.pid))
        kill_rules.kill(family)
    assert len(family) == 2
    assert not any(psutil.pid_exists(process.pid) for process in family)


def test_a_difference_names_column_rows_and_values(recompute, tokens):
    assert recompute.table_differences(tokens, tokens) == []
    (line,) = recompute.table_differences(tokens, tokens.with_columns(window=pl.col("window") * 7))
    assert line == "column window: 4 of 8 rows differ: 1 now 7, 1 now 7, 1 now 7"
    assert recompute.table_differences(tokens, tokens.head(7)) == ["8 rows, now 7"]
    assert "columns" in recompute.table_differences(tokens, tokens.drop("kl"))[0]


def test_bytes_that_differ_are_never_called_the_same(recompute, tokens, tmp_path):
    first, again = tmp_path / "a.parquet", tmp_path / "b.parquet"
    tokens.write_parquet(first, compression="zstd")
    tokens.write_parquet(again, compression="lz4")
    assert recompute.compare(first, first) == []
    assert "the same content in other bytes" in recompute.compare(first, again)[0]
    (tmp_path / "a.json").write_text('{\n "kl": 1\n}')
    (tmp_path / "b.json").write_text('{\n "kl": 2\n}')
    assert recompute.compare(tmp_path / "a.json", tmp_path / "b.json") == ['"kl": 1 now "kl": 2']


def test_a_file_with_seconds_has_to_be_written_again_and_may_hold_others(recompute, tmp_path):
    first, again = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text('{"seconds": 1}')
    assert recompute.compare(first, again, timed=True) == ["is not written again"]
    again.write_text('{"seconds": 2}')
    assert recompute.compare(first, again, timed=True) == [] != recompute.compare(first, again)


def test_the_smallest_table_that_a_glob_names_is_taken(recompute, place, tokens):
    tokens.head(1).write_parquet(place / "results/cells/m/small.parquet")
    tokens.head(1).select("kl").write_parquet(place / "results/cells/m/no-cells.parquet")
    assert recompute.smallest(place) == "results/cells/m/small.parquet"
    assert recompute.smallest(place, "results/cells/m/n*") == "results/cells/m/no-cells.parquet"
    assert recompute.smallest(place, "results/cells/m/x*") == "results/cells/m/x.parquet"
    with pytest.raises(SystemExit, match="make findings"):
        recompute.smallest(place, "results/noise/*/*")


def test_only_a_jobs_own_files_are_missing_from_the_scratch_copy(recompute, outcome, place, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("scratch")
    job = outcome.Job("cells_job", ("results/cells/m/x.parquet",), "results/logs/cells/m/x.log")
    (place / "results/cells/m/other.json").write_text("{}")
    recompute.mirror(place, scratch, job)
    assert outcome.made_files(scratch) == ["calib/sigma/m/hf.json", "results/cells/m/other.json"]
    assert (scratch / "calib").samefile(place / "calib")


@pytest.mark.parametrize(("fixed_part", "unit"), [(14.0, 0.25), (0.0, 3.0)])
def test_a_line_has_the_ratio_two_whatever_its_fixed_part(cost, fixed_part, unit):
    sizes = (2, 8, 16)
    found = cost.growth(sizes, [fixed_part + unit * size for size in sizes])
    assert found == pytest.approx((fixed_part, unit, 2))


def test_a_square_is_no_line(cost):
    sizes = (2, 8, 16)
    *_, ratio = cost.growth(sizes, [size**2 for size in sizes])
    assert ratio > 3


def test_cost_points_cover_each_factor_once_per_engine(cost):
    points = cost.points()
    assert len(points) == len(set(points)) == 2 * 7
    for factor, sizes in cost.SIZES.items():
        assert set(sizes) <= {getattr(point, factor) for point in points}
        assert sizes[2] == 2 * sizes[1]


def test_cost_survives_its_csv(cost, tmp_path):
    costs = {point: cost.Cost(1.5 + i, 0.1 * i, 600.0) for i, point in enumerate(cost.points())}
    (tmp_path / "cost.csv").write_text(cost.csv(costs))
    assert cost.read_csv(tmp_path / "cost.csv") == costs
    assert len(cost.growth_table(costs).splitlines()) == 2 + 2 * len(cost.SIZES)


def test_no_time_on_the_clock_for_jobs_of_different_days(cost):
    together = [("cells", 60.0, 600.0, 1060.0), ("layers", 50.0, 900.0, 1055.0)]
    assert cost.on_the_clock(together) == 60.0
    assert cost.on_the_clock([*together, ("noise", 40.0, 700.0, 90000.0)]) is None


def test_memory_is_that_of_jobs_that_ran_at_one_time(cost):
    jobs = [("a", 10.0, 500.0, 10.0), ("b", 5.0, 300.0, 12.0), ("c", 20.0, 400.0, 30.0), ("d", 8.0, 200.0, 20.0)]
    assert cost.at_once(jobs) == 800.0  # a with b; c begins when a has ended, and with it b and then d
    assert cost.at_once([*jobs, ("e", 1.0, 450.0, 11.0)]) == 1150.0  # of b, c and e


def test_a_limit_that_is_passed_says_no(cost):
    assert cost.against(cost.LIMITS["MiB"] + 1, "MiB")[1] == "NO"
    assert cost.against(cost.LIMITS["MiB"] - 1, "MiB")[1] == "yes"


def test_a_benchmark_counts_for_its_stage_whatever_its_model(cost, outcome, place, monkeypatch):
    job = outcome.Job("cells_job", ("results/cells/m/x.parquet",), "results/logs/cells/m/x.log")
    (place / job.benchmark).write_text("s\tmax_pss\n1.5\t20\n")
    monkeypatch.setattr(cost.outcome, "planned_jobs", lambda _: [job])
    assert [row[:3] for row in cost.benchmarks(place)] == [("cells", 1.5, 20.0)]

"""How long a run still takes, from what jobs took before and how this run goes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


@pytest.fixture
def progress(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("progress")


def test_what_is_left_is_shared_by_the_cores_and_no_less_than_the_longest_job(progress):
    jobs = [progress.Job(100.0), progress.Job(300.0), progress.Job(200.0, began=0.0)]
    assert progress.left(jobs, now=50.0, cores=1) == pytest.approx(100 + 300 + 150)
    assert progress.left(jobs, now=50.0, cores=8) == 300.0
    assert progress.left([progress.Job(10.0, began=0.0, ended=9.0)], now=20.0, cores=2) == 0.0


def test_a_slow_machine_makes_what_is_left_longer(progress):
    """Twice as slow as recorded so far; little that is done says nothing of the pace."""
    done, few = progress.Job(100.0, began=0.0, ended=200.0), progress.Job(10.0, began=0.0, ended=500.0)
    assert progress.left([done, progress.Job(60.0)], now=200.0, cores=1) == pytest.approx(120.0)
    assert progress.left([few, progress.Job(60.0)], now=500.0, cores=1) == pytest.approx(60.0)


def test_a_job_that_takes_longer_than_expected_leaves_nothing_and_no_less(progress):
    assert progress.left([progress.Job(10.0, began=0.0)], now=100.0, cores=1) == 0.0


def test_a_model_that_was_not_recorded_is_expected_to_be_like_the_others(progress):
    recorded = {"measure/a/hf-float32": 100.0, "measure/b/hf-float32": 300.0, "measure/a/vllm-float32": 7.0}
    assert progress.expected("measure/a/hf-float32", recorded) == 100.0
    assert progress.expected("measure/c/hf-float32", recorded) == 200.0
    assert progress.expected("measure/c/float32", recorded) == progress.UNKNOWN
    assert progress.expected("corpus/c/windows", recorded) == progress.UNKNOWN


@dataclass(eq=False)
class Planned:
    """A job as Snakemake plans it."""

    benchmark: str | None
    log: list


def test_a_job_has_one_name_wherever_its_benchmark_lies(progress):
    for place in ("", ".snakemake/storage/s3/bucket/"):
        assert progress.name_of(f"{place}results/benchmarks/sigma/m/hf.tsv") == "sigma/m/hf"


def test_a_run_sees_what_began_and_what_ended(progress, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "read", lambda: {"sigma/m/hf": 120.0, "gap/m": 60.0})
    first, second = (
        Planned(f"results/benchmarks/{name}.tsv", [f"{name.partition('/')[0]}.log"]) for name in ("sigma/m/hf", "gap/m")
    )
    target, finished = Planned(None, []), set()
    dag = SimpleNamespace(needrun_jobs=lambda exclude_finished: [first, second, target], finished=finished.__contains__)
    run = progress.Run(dag, cores=1)
    run.start -= 10
    assert run.line(run.start) == "About 3 min left: 0 of 2 jobs are done"
    Path("sigma.log").touch()
    run.look(run.start + 20)
    assert run.line(run.start + 80) == "About 2 min left: 0 of 2 jobs are done"
    finished.add(first)
    run.look(run.start + 140)
    assert run.line(run.start + 140) == "About 1 min left: 1 of 2 jobs are done"

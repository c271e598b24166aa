"""How long a run still takes, from what jobs took before and how this run goes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


@pytest.fixture
def progress(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("progress")


def done(progress, seconds=300.0, factor=1.0):
    """A job that has ended, long enough that the pace is known."""
    return progress.Job(seconds, began=0.0, ended=seconds * factor)


def test_what_is_left_is_shared_by_the_cores_and_no_less_than_the_longest_job(progress):
    jobs = [done(progress, 50.0), progress.Job(100.0), progress.Job(300.0), progress.Job(200.0, began=0.0)]
    assert progress.left(jobs, now=50.0, cores=1) == pytest.approx(100 + 300 + 150)
    assert progress.left(jobs, now=50.0, cores=8) == 300.0
    assert progress.left([done(progress)], now=320.0, cores=2) == 0.0


def test_a_chain_takes_as_long_as_its_jobs_one_after_the_other_whatever_the_cores(progress):
    first = progress.Job(100.0, began=0.0)
    second = progress.Job(100.0, [first])
    third, beside = progress.Job(100.0, [second]), progress.Job(150.0)
    assert progress.left([done(progress), first, second, third, beside], now=40.0, cores=8) == pytest.approx(260.0)
    assert progress.left([done(progress), first, second, third, beside], now=40.0, cores=1) == pytest.approx(410.0)


def test_a_slow_machine_makes_what_is_left_longer(progress):
    """Twice as slow as recorded so far; where next to nothing is done no pace is known, and so no time."""
    assert progress.left([done(progress, 100.0, 2.0), progress.Job(60.0)], 200.0, cores=1) == pytest.approx(120.0)
    assert progress.left([done(progress, 2.0, 9.0), progress.Job(60.0)], 18.0, cores=1) is None
    assert progress.left([progress.Job(60.0)], 0.0, cores=1) is None
    assert progress.words(None) == "the time left is not known yet"


def test_a_job_that_runs_longer_than_it_should_slows_the_others_and_is_not_done_at_once(progress):
    late = progress.Job(100.0, began=0.0)
    assert progress.left([late, progress.Job(100.0)], now=50.0, cores=2) is None  # it may end in time
    assert progress.left([late, progress.Job(100.0)], now=200.0, cores=2) == pytest.approx(200.0)
    assert progress.left([late], now=200.0, cores=2) == pytest.approx(20.0)
    quick = [done(progress, 100.0, 0.5), progress.Job(100.0, began=0.0)]
    assert progress.pace(quick, now=40.0) == pytest.approx(0.5)
    assert progress.pace(quick, now=150.0) == pytest.approx(1.0)


def test_a_model_that_was_not_recorded_is_expected_to_be_like_the_others(progress):
    recorded = {"measure/a/hf-float32": 100.0, "measure/b/hf-float32": 300.0, "corpus/a/windows": 7.0}
    assert progress.expected("measure/a/hf-float32", recorded, {}) == 100.0
    assert progress.expected("measure/c/hf-float32", recorded, {}) == 200.0
    assert progress.expected("measure/c/float32", recorded, {}) is None
    assert progress.expected("gap/c/windows", recorded, {}) is None


def test_where_a_model_runs_a_larger_one_takes_longer_by_its_parameters(progress):
    recorded = {"measure/a/hf-float32": 100.0, "corpus/a/windows": 7.0}
    parameters = {"a": 10, "c": 30}
    assert progress.expected("measure/c/hf-float32", recorded, parameters) == 300.0
    assert progress.expected("corpus/c/windows", recorded, parameters) == 7.0


@pytest.mark.parametrize(
    ("model", "published"),
    [("smollm2-135m", 134_515_008), ("qwen2.5-coder-0.5b", 630_167_424), ("gemma-3-270m", 268_098_176)],
)
def test_parameters_are_those_that_are_published(progress, model, published):
    """The 0.5 B of Qwen has its output apart here, as its file has it: 494,032,768 and 151,936 times 896 more."""
    sizes = importlib.import_module("sizes")
    assert sizes.parameters(SCRIPTS.parents[1] / "models" / model) == pytest.approx(published, rel=1e-3)
    assert sizes.parameters(SCRIPTS) is None
    assert sizes.memory_mb(published, 2) - sizes.memory_mb(published, 1) == pytest.approx(published * 4e-6, abs=1)


# The default run as README's table tells of it: seconds that a kind took there beside those that are recorded.
TOOK = {
    "measure/smollm2-135m/vllm-mechanisms": 366 / 128,
    "measure/smollm2-135m/hf-mechanisms": 542 / 338,
    "measure/smollm2-135m/hf-float32": 344 / 278,
    "ladder/smollm2-135m/further": 234 / 171,
    "ladder/smollm2-135m/jobs": 353 / 272,
    "float32": 575 / 456,
    "bfloat16": 366 / 281,
}
CHAIN = ("weights", "corpus", "asked", "needles", "capture", "sigma", "codebooks", "components", "archive", "residual")
LATER = ("ladder", "measure", "gap", "gate", "report")
FIRST = ("bfloat16", "hf-mechanisms", "float32", "vllm-mechanisms", "hf-float32")


def chain_of(name):
    """How far down the chain a job stands: it waits for those of its model that stand further up."""
    stage = name.partition("/")[0]
    return CHAIN.index(stage) if stage in CHAIN else len(CHAIN) + LATER.index(stage)


def replayed(progress, factor):
    """How long the recorded jobs take on two cores, `factor` times slower; what is said to be left, by minute."""
    jobs = {name: progress.Job(seconds) for name, seconds in progress.read().items()}
    for name, job in jobs.items():
        model = name.split("/")[1]
        job.needs = [
            other
            for one, other in jobs.items()
            if chain_of(one) < chain_of(name)
            and {chain_of(one), chain_of(name)} != {len(CHAIN), len(CHAIN) + 1}
            and (model in one.split("/") or name.startswith("report"))
        ]
        kind = name.rpartition("/")[2]
        job.priority = 100 * ("smollm2" in name) + (FIRST.index(kind) if kind in FIRST else 0)
    ends = {
        name: factor * jobs[name].expected * TOOK.get(name, TOOK.get(name.rpartition("/")[2], 1.25)) for name in jobs
    }
    now, told = 0.0, []
    while any(job.ended is None for job in jobs.values()):
        for name, job in jobs.items():
            if job.began is not None and job.ended is None and now >= job.began + ends[name]:
                job.ended = now
        running = sum(job.began is not None and job.ended is None for job in jobs.values())
        ready = [
            job for job in jobs.values() if job.began is None and all(other.ended is not None for other in job.needs)
        ]
        for job in sorted(ready, key=lambda job: -job.priority)[: 2 - running]:
            job.began = now
        if now % 60 == 0:
            told.append((now, progress.left(list(jobs.values()), now, 2)))
        now += 4.0
    return now, told


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_replayed_run_is_told_about_right_as_soon_as_anything_is(progress, factor):
    whole, told = replayed(progress, factor)
    said = [(now, left) for now, left in told if left is not None]
    assert said[0][0] <= 0.2 * whole
    errors = [left - (whole - now) for now, left in said]
    assert max(map(abs, errors)) < 0.3 * whole and abs(sum(errors)) / len(errors) < 0.15 * whole
    ends = [now + left for now, left in said]
    assert max(ends) < 1.5 * min(ends)


@dataclass(eq=False)
class Planned:
    """A job as Snakemake plans it."""

    benchmark: str | None
    log: list = field(default_factory=list)


def test_a_job_has_one_name_wherever_its_benchmark_lies(progress):
    for place in ("", ".snakemake/storage/s3/bucket/"):
        assert progress.name_of(f"{place}results/benchmarks/sigma/m/hf.tsv") == "sigma/m/hf"


def test_a_run_sees_what_began_and_what_ended(progress, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "read", lambda: {"sigma/m/hf": 120.0, "gap/m": 60.0})
    first, second, strange = (
        Planned(f"results/benchmarks/{name}.tsv", [f"{name.partition('/')[0]}.log"])
        for name in ("sigma/m/hf", "gap/m", "kvstore/policy/m")
    )
    target, finished = Planned(None), set()
    jobs = [first, second, strange, target]
    dag = SimpleNamespace(
        needrun_jobs=lambda exclude_finished: jobs,
        finished=finished.__contains__,
        dependencies={first: {}, second: {first: set()}, strange: {}, target: {second: set()}},
    )
    run = progress.Run(dag, 1, {})
    run.start -= 10
    assert run.line(run.start) == "0 of 3 jobs are done; the time left is not known yet"
    Path("sigma.log").touch()
    run.look(run.start + 20)
    assert run.jobs[second].needs == [run.jobs[first]]
    finished.add(first)
    run.look(run.start + 140)
    besides = ", plus 1 of unknown length"
    assert run.line(run.start + 140) == f"1 of 3 jobs are done; about 1 min left{besides}"
    finished.add(strange)
    run.look(run.start + 140)
    assert run.line(run.start + 140) == "2 of 3 jobs are done; about 1 min left"

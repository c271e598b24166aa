"""Experiments with other parameters, in the workspace and in the queue: what they run, and that none mixes files."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from itertools import product

import pytest

MODELS, BITS = ("reference", "other"), (2, 3, 4)
# Verbs whose jobs do not depend on bits: their results are those of the run before. The gate's do, all of its stage, as
# it measures again what it certifies.
WITHOUT_BITS = {"weights", "texts", "corpus", "needles", "asked", "capture", "sigma", "components", "archive"}
WITHOUT_BITS |= {"planted", "restore", "policy", "bitplanes", "placement", "tradeoffs", "capacity", "service"}
WITHOUT_BITS |= {"ranks", "micro", "page"}
# What is asked for is said by the codecs' names alone; texts are read, and single operations timed, without a model.
OF_NO_MODEL = ("calib/asked/", "calib/corpus/texts.", "results/micro/")
PATIENCE = 1800  # seconds, for the whole queue
PENDING = re.compile("Queued|Running")  # in `dvc queue status`; workers take a moment to report themselves
# Every result of some revisions, from DVC's cache and not from the workspace.
RESULTS = """
import json, sys
from dvc.api import DVCFileSystem
found = {}
for rev in sys.argv[1:]:
    files = DVCFileSystem(rev=rev)
    paths = [path for part in ("calib", "results") for path in files.find(part)]
    found[rev] = {path: files.read_text(path) for path in paths if not path.endswith(".snakemake_timestamp")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def other_bits(reproduced, tmp_path_factory):
    """A copy of `reproduced` after `dvc exp run -S bits=4` in its workspace; with what ran."""
    place = tmp_path_factory.mktemp("experiments")
    lab = reproduced.copy(place)
    lab.run("dvc", "exp", "run", "-S", "bits=4")
    yield lab, lab.ran(), lab.files()
    lab.attempt("dvc", "queue", "stop", "--kill")  # workers that a failed test has left; else there are none
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def queued(other_bits):
    """The six experiments of two models and three bits, run from one queue by two workers; see `shown`."""
    lab = other_bits[0]
    lab.run("git", "checkout", "params.yaml", "dvc.lock")
    models = ",".join(f"models/{name}" for name in MODELS)
    lab.run("dvc", "exp", "run", "--queue", "-S", f"models.0.path={models}", "-S", "bits=2,3,4")
    lab.run("dvc", "queue", "start", "-j", "2")
    wait_for_workers(lab)
    return shown(lab)


def wait_for_workers(lab):
    """Until the queue is empty and its workers have gone; they are processes of their own."""
    deadline = time.monotonic() + PATIENCE
    while "0 active, 0 idle" not in (status := lab.run("dvc", "queue", "status")) or PENDING.search(status):
        assert time.monotonic() < deadline, status
        time.sleep(5)
    assert "Failed" not in status, status


def shown(lab):
    """The experiments of `dvc exp show`: (model, bits) -> their revisions."""
    found = {}
    for baseline in json.loads(lab.run("dvc", "exp", "show", "--json")):
        for experiment in baseline["experiments"] or []:
            revision = experiment["revs"][-1]
            params = revision["data"]["params"]["params.yaml"]["data"]
            key = params["models"][0]["path"].rpartition("/")[2], params["bits"]
            found.setdefault(key, []).append(revision["rev"])
    return found


@pytest.mark.nightly
def test_other_bits_run_what_depends_on_bits(other_bits, reproduced):
    _, ran, files = other_bits
    everything = reproduced.ran(forget=False)
    kept = [line for line in everything if line.partition(" ")[0] in WITHOUT_BITS]
    assert {line.partition(" ")[0] for line in kept} == WITHOUT_BITS
    assert ran == sorted(set(everything) - set(kept))
    before = reproduced.files()
    assert {name for name in files if files[name] != before[name]} >= {"results/gap/FINDINGS.md"}
    assert all(files[name] == before[name] for name in files if name.startswith(("calib/capture", "calib/sigma")))


@pytest.mark.nightly
def test_dvc_tells_what_another_value_changed(other_bits):
    lab = other_bits[0]
    params = json.loads(lab.run("dvc", "params", "diff", "--json"))
    assert params == {"params.yaml": {"bits": {"old": 3, "new": 4, "diff": 1}}}
    metrics = json.loads(lab.run("dvc", "metrics", "diff", "--json"))
    assert metrics["results/gap/summary.json"]["reference.bits"] == {"old": 3, "new": 4, "diff": 1}
    lab.run("dvc", "plots", "diff", "--out", "plots")
    drawn = (lab.root / "plots/index.html").read_text()
    assert "workspace" in drawn and "HEAD" in drawn
    shutil.rmtree(lab.root / "plots")


@pytest.mark.nightly
def test_a_queue_of_two_models_and_three_bits_gives_six_experiments(queued):
    assert set(queued) == set(product(MODELS, BITS))
    assert all(len(revisions) == 1 for (_, bits), revisions in queued.items() if bits != 4)


@pytest.mark.nightly
def test_no_experiment_holds_a_file_of_another(queued, other_bits, reproduced, standin):
    lab, _, four_bits = other_bits
    revisions = {key: found[-1] for key, found in queued.items()}
    results = json.loads(lab.run(sys.executable, "-c", RESULTS, *revisions.values()))
    for (model, bits), revision in revisions.items():
        made = {path: text for path, text in results[revision].items() if not path.startswith("results/code/")}
        told = {path: standin.read(path, text) for path, text in made.items()}
        models = {path: [] if path.startswith(OF_NO_MODEL) else [model] for path in told}
        assert {path: words["saw"]["models"] for path, words in told.items()} == models
        assert all(words["saw"]["bits"] in ([], [bits]) for words in told.values())
        assert all(words["file"] == path for path, words in told.items())
    findings = {key: results[revision]["results/gap/FINDINGS.md"] for key, revision in revisions.items()}
    assert len(set(findings.values())) == len(MODELS) * len(BITS)
    assert text_of(reproduced.files()) == results[revisions["reference", 3]]
    assert text_of(four_bits) == results[revisions["reference", 4]]


def text_of(files):
    """Results as `RESULTS` gives them."""
    return {name: data.decode() for name, data in files.items() if not name.endswith(".snakemake_timestamp")}


@pytest.mark.nightly
def test_going_back_runs_nothing(queued, other_bits, reproduced):
    lab = other_bits[0]
    lab.ran()
    lab.run("dvc", "checkout")
    lab.run("dvc", "repro")
    assert lab.ran() == []
    assert lab.files() == reproduced.files()

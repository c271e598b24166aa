"""One run at a time, none that outlives a kill, nothing recorded that was not measured. Real Snakemake, real DVC.

A workflow of one rule uses the same guards as the Snakefile, and the default profile. Its job writes down the
parameter that it was given, but not before the file `go` is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from kvlab.core import parent_watch

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATIENCE = 90  # seconds, for a machine that is busy with other things

SNAKEFILE = f"""
import sys
sys.path[:0] = ["{ROOT / "src"}", "{ROOT / "workflow" / "scripts"}"]
import onerun
import unedited
from kvlab.core import parent_watch

configfile: "params.yaml"

parent_watch.announce()

rule made:
    output: "results/family/made.txt"
    params: cfg=config["bits"]
    shell: "{sys.executable} job.py {{output}} {{params.cfg}}"

onstart:
    onerun.begin()
    unedited.remember(config)

onsuccess:
    unedited.check()
"""
JOB = f"""
import os, sys, time
sys.path.insert(0, "{ROOT / "src"}")
from kvlab.core import parent_watch
from kvlab.core import records
parent_watch.follow_run()
open(f"started-{{sys.argv[2]}}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
records.write_text(sys.argv[1], sys.argv[2])
"""
MODELS = "models:\n- path: weights\n"
SNAKEMAKE = ("snakemake", "made")
REPRO = ("dvc", "repro")


def ended(*processes) -> bool:
    """Whether processes have ended, or do so in the moments in which a busy machine still lists them."""
    deadline = time.monotonic() + 10
    while any(map(parent_watch.alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(parent_watch.alive, processes))


class Place:
    """A folder with the workflow, and the commands that are typed in it."""

    def __init__(self, folder):
        self.folder, self.running = folder, []
        stage = {
            "cmd": "snakemake --allowed-rules made -- made",
            "deps": ["job.py", "${models[0].path}"],
            "params": ["bits"],
        }
        self.write("Snakefile", SNAKEFILE)
        self.write("job.py", JOB)
        self.write("weights/model.txt", "1")
        self.write("dvc.yaml", yaml.safe_dump({"stages": {"made": stage | {"outs": ["results/family"]}}}))
        self.write(".dvc/config", "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n")
        self.write("profiles/default/config.yaml", (ROOT / "profiles" / "default" / "config.yaml").read_text())
        self.bits(3)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def bits(self, value):
        self.write("params.yaml", f"bits: {value}\n{MODELS}")

    def start(self, command, **environment):
        """A command in the background, in a group of its own."""
        place = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(self.folder)}
        self.running.append(
            subprocess.Popen(
                [BIN / command[0], *command[1:]],
                cwd=self.folder,
                env=os.environ | place | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return self.running[-1]

    def at_work(self, command, bits=3):
        """A command whose job has started, and the job."""
        run = self.start(command)
        self.wait_for(lambda: (self.folder / f"started-{bits}").exists() or run.poll() is not None)
        assert run.poll() is None, run.communicate()
        family = psutil.Process(run.pid).children(recursive=True)
        return run, next(process for process in family if process.cmdline()[1:2] == ["job.py"])

    def type(self, command, **environment):
        """Exit code and words of a command."""
        run = self.start(command, **environment)
        words, _ = run.communicate(timeout=PATIENCE)
        return run.returncode, words

    def finish(self, run):
        """Let the job go on, and wait for the run's end."""
        self.write("go", "")
        words, _ = run.communicate(timeout=PATIENCE)
        return run.returncode, words

    @staticmethod
    def wait_for(happened):
        end = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.05)

    @property
    def made(self):
        return self.folder / "results" / "family" / "made.txt"

    def recorded(self):
        """The parameter that dvc.lock names."""
        stage = yaml.safe_load((self.folder / "dvc.lock").read_text())["stages"]["made"]
        return stage["params"]["params.yaml"]["bits"]

    def close(self):
        for run in self.running:
            for process in psutil.process_iter():
                if process.pid == run.pid or session(process) == run.pid:
                    process.kill()
            if not run.stdout.closed:
                run.communicate()


def session(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.close()


def lines_with(word, text):
    return [line for line in text.splitlines() if word in line]


@pytest.mark.full
def test_a_second_snakemake_is_refused_in_one_line(place):
    first, _ = place.at_work(SNAKEMAKE)
    code, words = place.type(SNAKEMAKE)
    (line,) = lines_with("error:", words)
    assert code == 2 and "Traceback" not in words
    assert "another run is at work in this folder: `snakemake made`" in line
    assert f"process {first.pid}," in line and f"kill {first.pid}" in line
    assert place.finish(first)[0] == 0 and place.made.read_text() == "3"


@pytest.mark.full
def test_dvc_removes_nothing_while_a_snakemake_runs_and_still_answers(place):
    place.write("results/family/other.txt", "kept")
    first, _ = place.at_work(SNAKEMAKE)
    code, words = place.type(REPRO)
    assert code == 255 and f"(PID {first.pid}): snakemake made" in words and "is busy" in words
    assert (place.folder / "results/family/other.txt").exists()
    assert place.type(("dvc", "status"))[0] == 0
    assert place.finish(first)[0] == 0 and place.made.read_text() == "3"
    place.made.unlink()
    assert place.type(REPRO)[0] == 0  # it has signed off


@pytest.mark.nightly
def test_snakemake_is_refused_while_dvc_runs(place):
    first, _ = place.at_work(REPRO)
    code, words = place.type(SNAKEMAKE)
    (line,) = lines_with("error:", words)
    assert code == 2 and f"`dvc repro`, process {first.pid}," in line
    assert place.finish(first)[0] == 0 and place.recorded() == 3


@pytest.mark.nightly
def test_snakemake_is_refused_while_dvc_writes_without_one(place):
    busy = f'{{"write": {{"{place.folder}/results/family": {{"pid": {os.getpid()}, "cmd": "dvc commit"}}}}}}'
    place.write(".dvc/tmp/rwlock", busy)
    code, words = place.type(SNAKEMAKE)
    (line,) = lines_with("error:", words)
    assert code == 2 and "dvc commit" in line and "rm .dvc/tmp/rwlock" in line
    assert not place.made.exists() and not (place.folder / "started-3").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("command", [SNAKEMAKE, REPRO])
def test_after_the_kill_of_all_the_same_command_is_enough(place, command):
    first, job = place.at_work(command)
    family = psutil.Process(first.pid).children(recursive=True)
    for process in [first, *family]:
        process.kill()
    first.wait()
    place.bits(4)
    place.write("go", "")
    code, words = place.type(command)
    assert code == 0, words
    assert place.made.read_text() == "4" and ended(job)


@pytest.mark.full
def test_a_job_of_a_killed_snakemake_ends_and_writes_nothing(place):
    first, job = place.at_work(SNAKEMAKE)
    first.kill()
    first.wait()
    place.bits(4)
    second, _ = place.at_work(SNAKEMAKE, bits=4)
    assert ended(job)
    assert place.finish(second)[0] == 0 and place.made.read_text() == "4"


@pytest.mark.nightly
def test_a_snakemake_ends_with_its_dvc(place):
    first, job = place.at_work(REPRO)
    (snakemake,) = psutil.Process(first.pid).children()
    first.kill()
    first.wait()
    place.bits(4)
    second, _ = place.at_work(REPRO, bits=4)
    assert ended(job, snakemake)
    assert place.finish(second)[0] == 0
    assert (place.made.read_text(), place.recorded()) == ("4", 4)


@pytest.mark.nightly
def test_a_snakemake_whose_dvc_is_gone_begins_nothing(place):
    place.write(".dvc/tmp/rwlock", '{"write": {}}')
    code, words = place.type(SNAKEMAKE, DVC_STAGE="made")
    assert code == 2 and len(lines_with("the DVC that started this stage is gone", words)) == 1
    assert not (place.folder / "started-3").exists()


EDITS = {
    "params.yaml": ("bits: 4\n" + MODELS, "params.yaml: bits"),
    "job.py": (JOB + "\n", "job.py"),
    "weights/model.txt": ("2", "weights/model.txt"),
}


@pytest.mark.parametrize(
    "edit",
    [pytest.param(edit, marks=pytest.mark.full if edit == "job.py" else pytest.mark.nightly) for edit in EDITS],
)
def test_what_was_edited_meanwhile_is_not_recorded(place, edit):
    text, named = EDITS[edit]
    first, _ = place.at_work(REPRO)
    place.write(edit, text)
    code, words = place.finish(first)
    (line,) = lines_with("error:", words)
    assert code != 0 and f"edited while this stage ran: {named};" in line
    assert not (place.folder / "dvc.lock").exists()
    assert place.type(REPRO)[0] == 0
    assert place.made.read_text() == str(place.recorded()) == ("4" if edit == "params.yaml" else "3")


@pytest.mark.nightly
def test_what_the_stage_does_not_read_may_be_edited(place):
    first, _ = place.at_work(REPRO)
    place.write("params.yaml", "bits: 3\ntitle: other\n" + MODELS)
    assert place.finish(first)[0] == 0 and place.recorded() == 3


@pytest.mark.nightly
def test_a_record_that_a_kill_cut_short_comes_back_from_the_run_cache(place):
    place.write("go", "")
    assert place.type(REPRO)[0] == 0
    record = place.folder / "dvc.lock"
    whole = record.read_text()
    place.write("dvc.lock", whole.partition("deps:")[0] + "deps:\n")
    code, words = place.type(REPRO)
    assert code == 255 and "'./dvc.lock' validation failed" in words
    record.unlink()
    (place.folder / "started-3").unlink()
    assert place.type(REPRO)[0] == 0 and record.read_text() == whole
    assert not (place.folder / "started-3").exists()  # nothing was run


@pytest.mark.full
def test_without_dvc_snakemake_runs_alone(place):
    shutil.rmtree(place.folder / ".dvc")
    place.write("go", "")
    assert place.type(SNAKEMAKE)[0] == 0 and place.made.read_text() == "3"
    assert not (place.folder / ".dvc").exists()

"""handover.py on a small repository with two stages: what it records, what it makes known, and what it refuses.

Jobs that really run write a line into a trace file, so that "runs nothing" is counted and not read from a log.
"""

from __future__ import annotations

import configparser
import importlib
import json
import os
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANDOVER = ROOT / "workflow" / "scripts" / "handover.py"
BIN = Path(sys.executable).parent

FILES = {
    "params.yaml": "bits: 4\ntitle: plain\n",
    "src/fit.py": "VALUE = 1\n",
    "data/words.txt": "words\n",
    ".gitignore": ".snakemake/\n/calib/*\n/results/*\n/trace\n",
    ".dvcignore": ".*.tmp\n",
    "profiles/default/config.yaml": "cores: 2\nrerun-incomplete: true\nmax-checksum-file-size: 1TB\nnolock: true\n",
    "Snakefile": """\
import ast
import hashlib
from pathlib import Path


configfile: "params.yaml"


def code(path):
    return hashlib.sha256(ast.dump(ast.parse(Path(path).read_text())).encode()).hexdigest()


include: "workflow/rules/fit.smk"
include: "workflow/rules/draw.smk"


rule all:
    default_target: True
    input:
        rules.draw.input,
""",
    "workflow/rules/fit.smk": """\
rule fit_one:
    output:
        record="calib/fit/{engine}.txt",
        tables=directory("calib/fit/{engine}"),
    log:
        "results/logs/fit/{engine}.log",
    benchmark:
        "results/benchmarks/fit/{engine}.tsv"
    params:
        cfg={"bits": config["bits"]},
        code=code("src/fit.py"),
    shell:
        "(echo {wildcards.engine} >> trace; mkdir {output.tables}; echo {params.cfg[bits]} > {output.tables}/bits;"
        " echo {wildcards.engine} {params.cfg[bits]} > {output.record}) > {log} 2>&1"


rule fit:
    input:
        expand("calib/fit/{engine}.txt", engine=["hf", "vllm"]),
""",
    "workflow/rules/draw.smk": """\
rule draw_all:
    input:
        expand("calib/fit/{engine}.txt", engine=["hf", "vllm"]),
        words="data/words.txt",
    output:
        "results/draw.txt",
    log:
        "results/logs/draw/draw.log",
    params:
        cfg={"title": config["title"]},
    shell:
        "(echo draw >> trace; echo {params.cfg[title]}; cat {input}) > {output} 2> {log}"


rule draw:
    input:
        "results/draw.txt",
""",
    "dvc.yaml": """\
stages:
  fit:
    cmd: snakemake --nolock --allowed-rules fit fit_one -- fit
    deps: [src/fit.py, workflow/rules/fit.smk]
    params: [bits]
    outs: [calib/fit]
  draw:
    cmd: snakemake --nolock --allowed-rules draw draw_all -- draw
    deps: [calib/fit, data/words.txt, workflow/rules/draw.smk]
    params: [title]
    outs: [results/draw.txt]
""",
}


class Place:
    """A repository in a folder, and the commands that a person types there."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def run(self, *command, code: int | None = 0) -> str:
        """Both streams of a command; its exit code is checked unless it is None."""
        env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(map(str, command), cwd=self.folder, env=env, text=True, timeout=180, **streams)
        assert code in (None, done.returncode), f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def handover(self, *arguments) -> dict[str, str]:
        """What became of each stage."""
        lines = self.run(sys.executable, HANDOVER, *arguments).splitlines()
        return {line.split()[0]: line.split(None, 1)[1] for line in lines}

    def refused(self, *arguments) -> str:
        """The line of a refusal, after which nothing may be recorded or known that was not before."""
        before = self.known()
        (line,) = self.run(sys.executable, HANDOVER, *arguments, code=2).splitlines()
        assert line.startswith("error: ") and self.known() == before
        return line

    def known(self) -> dict[str, bytes]:
        """dvc.lock and Snakemake's records."""
        files = [self / "dvc.lock", *(self / ".snakemake/metadata").glob("*")]
        return {file.name: file.read_bytes() for file in files if file.exists()}

    def edit(self, name: str, old: str, new: str):
        text = (self / name).read_text()
        assert old in text
        (self / name).write_text(text.replace(old, new))

    def jobs(self) -> list[str]:
        """Jobs that ran since the last call."""
        trace = self / "trace"
        lines = trace.read_text().split() if trace.exists() else []
        trace.unlink(missing_ok=True)
        return sorted(lines)

    def nothing_to_do(self) -> bool:
        return "Nothing to be done" in self.run("snakemake", "-n")

    def dvc_clean(self) -> bool:
        return json.loads(self.run("dvc", "status", "--json")) == {}

    def record(self, file: str, folder: str = "metadata") -> Path:
        """Where Snakemake keeps what it knows of a file."""
        return self / f".snakemake/{folder}" / urlsafe_b64encode(file.encode()).decode()


def copied(place: Place, folder: Path) -> Place:
    shutil.copytree(place.folder, folder, symlinks=True)
    return Place(folder)


@pytest.fixture(scope="module")
def first_made(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("made"))
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    place.run("git", "init", "-q")
    place.run("dvc", "init", "-q")
    for option in (["core.analytics", "false"], ["core.autostage", "true"], ["cache.type", "copy"]):
        place.run("dvc", "config", *option)
    (place / ".dvcignore").write_text(FILES[".dvcignore"])
    place.run("snakemake", "-q", "all")
    assert place.jobs() == ["draw", "hf", "vllm"]
    return place


@pytest.fixture(scope="module")
def first_recorded(first_made, tmp_path_factory) -> Place:
    place = copied(first_made, tmp_path_factory.mktemp("recorded") / "place")
    place.run("dvc", "commit", "-f")
    place.run("git", "add", "--all")
    place.run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "recorded")
    return place


@pytest.fixture
def made(first_made, tmp_path) -> Place:
    """Everything made by Snakemake, nothing recorded by DVC."""
    return copied(first_made, tmp_path / "place")


@pytest.fixture
def recorded(first_recorded, tmp_path) -> Place:
    """Everything made by Snakemake and recorded by DVC."""
    return copied(first_recorded, tmp_path / "place")


@pytest.mark.full
def test_what_snakemake_made_is_a_result_of_dvc(made):
    assert made.handover("adopt") == {"fit": "recorded", "draw": "recorded"}
    made.run("dvc", "repro")
    shutil.rmtree(made / "calib")
    (made / "dvc.lock").unlink()
    made.run("dvc", "repro")  # from the run-cache
    assert made.jobs() == [] and made.dvc_clean()
    assert (made / "calib/fit/hf/bits").read_text() == "4\n"
    lock = made.known()["dvc.lock"]
    assert made.handover("adopt") == {"fit": "up to date", "draw": "up to date"}
    assert made.known()["dvc.lock"] == lock


@pytest.mark.nightly
@pytest.mark.parametrize("maker", ["snakemake", "dvc"])
def test_a_comment_is_recorded_without_a_job(made, maker):
    if maker == "snakemake":
        made.handover("adopt")
    else:
        shutil.rmtree(made / "calib")
        made.run("dvc", "repro")
        assert made.jobs() == ["draw", "hf", "vllm"]
    for name in ("src/fit.py", "workflow/rules/draw.smk"):
        (made / name).write_text(f"# why\n{(made / name).read_text()}")
    assert not made.dvc_clean()
    assert made.handover("adopt") == {"fit": "recorded", "draw": "recorded"}
    assert made.jobs() == [] and made.dvc_clean()


@pytest.mark.nightly
def test_the_repository_keeps_copies():
    config = configparser.ConfigParser()
    config.read(ROOT / ".dvc" / "config")
    assert config["cache"]["type"] == "copy"  # otherwise DVC writes single files anew when it records them


def edit_output(place):
    (place / "calib/fit/hf.txt").write_text("hf 9\n")


def copy_older(place):
    edit_output(place)
    os.utime(place / "calib/fit/hf.txt", (1.0, 1.0))


def copy_into_folder(place):
    (place / "calib/fit/hf/bits").write_text("9\n")


def copy_older_into_folder(place):
    copy_into_folder(place)
    os.utime(place / "calib/fit/hf/bits", (1.0, 1.0))


def swap_input(place):
    times = (place / "data/words.txt").stat()
    (place / "data/words.txt").write_text("other\n")
    os.utime(place / "data/words.txt", ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGED = "it was changed after Snakemake recorded it; run: snakemake --forcerun"
SPOILT = {
    "edited": (edit_output, "fit: calib/fit/hf.txt", CHANGED),
    "copied, older": (copy_older, "fit: calib/fit/hf.txt", CHANGED),
    "edited in a folder": (copy_into_folder, "fit: calib/fit/hf: ", CHANGED),
    "copied into a folder, older": (copy_older_into_folder, "fit: calib/fit/hf: ", CHANGED),
    "gone from a folder": (lambda place: (place / "calib/fit/hf/bits").unlink(), "fit: calib/fit/hf: ", CHANGED),
    "no record": (lambda place: place.record("calib/fit/hf.txt").unlink(), "fit: calib/fit/hf.txt: ", "has no record"),
    "no log": (
        lambda place: (place / "results/logs/fit/hf.log").unlink(),
        "fit: calib/fit/hf (and 1 more): it was touched, not made",
        "run: snakemake --forcerun fit_one -- fit",
    ),
    "other input": (swap_input, "draw: results/draw.txt: it was made from another data/words.txt", "-- draw"),
    "job killed": (
        lambda place: place.record("calib/fit/hf.txt", "incomplete").write_text("{}"),
        "fit: the job of calib/fit/hf.txt did not end",
        "run: snakemake -- fit",
    ),
    "file of no job": (
        lambda place: (place / "calib/fit/old.txt").write_text("hf 2\n"),
        "fit: no job makes calib/fit/old.txt",
        "remove what is left",
    ),
    "folder of no job": (
        lambda place: shutil.copytree(place / "calib/fit/hf", place / "calib/fit/old"),
        "fit: no job makes calib/fit/old/.snakemake_timestamp (and 1 more)",
        "remove what is left",
    ),
}


@pytest.fixture(scope="module")
def handover():
    sys.path.insert(0, str(HANDOVER.parent))
    yield importlib.import_module("handover")
    sys.path.remove(str(HANDOVER.parent))


@pytest.fixture
def job_records(handover):
    return sys.modules["job_records"]


@pytest.fixture(scope="module")
def plan_of_first_made(first_made, handover):
    """What adopt learns from both tools in the unspoilt place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(first_made.folder)
        stages = list(handover.read_stages().values())
        return stages, handover.dvc_status(), handover.plan(stages)


@pytest.mark.full
@pytest.mark.parametrize("name", SPOILT)
def test_what_snakemake_did_not_make_is_not_recorded(
    handover, job_records, plan_of_first_made, made, name, monkeypatch
):
    monkeypatch.chdir(made.folder)
    job_records.digest.cache_clear()
    handover.check_adoptable(*plan_of_first_made)
    job_records.digest.cache_clear()
    spoil, what, mend = SPOILT[name]
    spoil(made)
    with pytest.raises(handover.Refusal) as refusal:
        handover.check_adoptable(*plan_of_first_made)
    assert what in str(refusal.value) and mend in str(refusal.value)


@pytest.mark.nightly
def test_what_config_made_is_not_recorded(recorded):
    recorded.run("snakemake", "-q", "all", "--config", "bits=3")
    line = recorded.refused("adopt")
    assert "fit: Snakemake would make calib/fit/hf again (params changed); run: snakemake -- fit" in line
    with (recorded / "profiles/default/config.yaml").open("a") as profile:
        profile.write("rerun-triggers: mtime\n")
    assert recorded.nothing_to_do() and "params changed" in recorded.refused("adopt", "fit")
    recorded.run("snakemake", "--touch", "--forceall", "-q", "all")
    assert recorded.jobs() == ["draw", "hf", "vllm"]
    line = recorded.refused("adopt")
    assert "fit: calib/fit/hf (and 3 more): it was touched, not made" in line
    recorded.run(*line.partition("run: ")[2].split())
    assert recorded.jobs() == ["hf", "vllm"]


@pytest.mark.nightly
def test_what_dvc_restored_under_other_parameters_is_not_recorded(recorded):
    recorded.edit("params.yaml", "plain", "fancy")
    recorded.run("snakemake", "-q", "all")
    recorded.run("dvc", "checkout", "--force")
    assert recorded.nothing_to_do() and not recorded.dvc_clean()
    assert (recorded / "results/draw.txt").read_text().startswith("plain")
    assert CHANGED in recorded.refused("adopt")


@pytest.mark.nightly
def test_a_stage_is_recorded_whole_and_stale_ones_are_left(recorded):
    recorded.edit("params.yaml", "bits: 4", "bits: 5")
    recorded.run("snakemake", "-q", "all", "--", "calib/fit/hf.txt")
    assert "fit: Snakemake would make calib/fit/vllm again (params changed)" in recorded.refused("adopt")
    recorded.run("snakemake", "-q", "all", "--", "fit")
    left = "left: as recorded earlier, and Snakemake would make it again"
    assert recorded.handover("adopt") == {"fit": "recorded", "draw": left}
    assert "draw: Snakemake would make results/draw.txt again" in recorded.refused("adopt", "draw")


@pytest.mark.nightly
def test_a_stage_is_recorded_after_what_it_reads(made):
    assert "draw: it reads fit, which DVC does not know as it is now; adopt both" in made.refused("adopt", "draw")
    assert made.handover("adopt", "draw", "fit") == {"fit": "recorded", "draw": "recorded"}


@pytest.mark.nightly
def test_what_snakemake_would_make_again_is_refused_with_both_ways_out(handover):
    draw = handover.Stage("draw", ("results/draw.txt",), ("fit",))
    made = [handover.Made("results/draw.txt", "draw_all", "ok", True)]
    with pytest.raises(handover.Refusal) as refusal:
        handover.check_done(draw, [draw], made)
    said = str(refusal.value)
    assert "draw: Snakemake would make results/draw.txt again (what it is made from would be made again)" in said
    assert "run: snakemake -- draw; or make pull, if DVC restored what it reads" in said


@pytest.mark.nightly
def test_what_was_never_made_is_left(made):
    (made / "results/draw.txt").unlink()
    (made / "calib/fit/.hf.txt.4711.tmp").write_text("")  # of a killed writer; DVC does not see it
    assert made.handover("adopt") == {"fit": "recorded", "draw": "left: not made"}


@pytest.mark.nightly
def test_what_a_clone_makes_again_is_recorded_although_it_is_what_dvc_lock_says(recorded):
    shutil.rmtree(recorded / ".dvc/cache")
    assert not recorded.dvc_clean()  # the files are there and right, and the cache lacks them
    assert recorded.handover("adopt") == {"fit": "recorded", "draw": "recorded"}
    assert recorded.dvc_clean() and recorded.jobs() == []


@pytest.mark.nightly
def test_nothing_is_recorded_while_another_run_reads_it(made):
    user = {"pid": os.getpid(), "cmd": "snakemake"}
    (made / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {}, "read": {str(made / "calib"): [user]}}))
    line = made.refused("adopt")
    assert "is busy" in line and f"(PID {os.getpid()}): snakemake" in line


@pytest.mark.nightly
def test_a_clone_gets_results_that_both_tools_know(recorded, tmp_path):
    recorded.run("dvc", "remote", "add", "--local", "-d", "shelf", tmp_path / "shelf")
    recorded.run("dvc", "push", "-q")
    recorded.run("git", "clone", "-q", ".", tmp_path / "clone")
    clone = Place(tmp_path / "clone")
    assert "dvc pull: " in clone.refused("pull")
    clone.run("dvc", "remote", "add", "--local", "-d", "shelf", tmp_path / "shelf")
    assert clone.handover("pull", "draw") == dict.fromkeys(["fit", "draw"], "known to Snakemake")
    assert clone.nothing_to_do() and clone.dvc_clean()
    clone.edit("src/fit.py", "VALUE", "# why\nVALUE")
    assert clone.handover("adopt") == {"fit": "recorded", "draw": "up to date"}
    clone.edit("src/fit.py", "# why", "# why not")
    clone.run("snakemake", "--touch", "--forceall", "-q", "all")
    assert "it was touched, not made" in clone.refused("adopt")
    assert clone.jobs() == []


@pytest.mark.full
def test_results_come_back_from_the_cache(recorded):
    for folder in ("calib", "results", ".snakemake"):
        shutil.rmtree(recorded / folder)
    assert recorded.handover("pull") == dict.fromkeys(["fit", "draw"], "known to Snakemake")
    assert recorded.nothing_to_do() and recorded.jobs() == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spoil", "what", "mend"),
    [
        (edit_output, "fit: dvc.lock is of another state (calib/fit: modified)", "else dvc repro fit"),
        (
            lambda place: place.edit("params.yaml", "bits: 4", "bits: 3"),
            "fit: dvc.lock is of another state (params.yaml: bits modified)",
            "run: make adopt STAGE=fit if Snakemake made it so, else dvc repro fit",
        ),
        (
            lambda place: place.edit("src/fit.py", "1", "2"),
            "fit: dvc.lock is of another state (src/fit.py: modified)",
            "else dvc repro fit",
        ),
        (
            lambda place: place.edit("dvc.yaml", "draw_all --", "draw_all  --"),
            "draw: dvc.lock is of another state (changed command)",
            "else dvc repro draw",
        ),
        (lambda place: (place / "dvc.lock").unlink(), "fit: dvc.lock has no record of it", "run: dvc repro fit"),
    ],
    ids=["edited output", "parameter", "code", "command", "no record"],
)
def test_only_what_dvc_vouches_for_is_made_known(recorded, spoil, what, mend):
    spoil(recorded)
    line = recorded.refused("pull", "draw")
    assert what in line and mend in line


@pytest.mark.nightly
def test_pull_says_when_snakemake_disagrees_all_the_same(recorded):
    recorded.edit("workflow/rules/draw.smk", "    params:", "    params:\n        now=__import__('time').time(),")
    recorded.run("dvc", "commit", "-f")
    line = recorded.run(sys.executable, HANDOVER, "pull", code=2)
    assert "Snakemake would still make results/draw.txt" in line and "make sync" in line


@pytest.mark.nightly
def test_an_unknown_stage_and_another_folder_are_refused(made, tmp_path):
    assert made.refused("adopt", "drew") == "error: 'drew' is no stage of dvc.yaml; did you mean 'draw'?"
    (tmp_path / "empty").mkdir()
    assert "there is no dvc.yaml here" in Place(tmp_path / "empty").refused("pull")

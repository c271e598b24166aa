"""Results from a remote: a folder, and an S3 server on loopback; what ci_cached runs, restores and says.

The pipelines here are three stages of one shell command each. The commands write into a trace outside of the
checkout, so that "nothing was run" is counted and not read from what ci_cached says about itself.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "workflow" / "scripts" / "ci_cached.py"
STAGES = """\
stages:
  words:
    cmd: mkdir -p out && sort words.txt > out/words.txt && echo words >> "$TRACE"
    deps: [words.txt]
    outs: [out/words.txt]
  title:
    cmd: mkdir -p out && cat title.txt out/words.txt > out/titled.txt && echo title >> "$TRACE"
    deps: [title.txt, out/words.txt]
    outs: [out/titled.txt]
  report:
    cmd: cat out/titled.txt > out/REPORT.md && echo report >> "$TRACE"
    deps: [out/titled.txt]
    outs: [out/REPORT.md]
"""


@dataclass
class Person:
    """Somebody with a home of their own, who works in checkouts below `folder`."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of the home, the git and the DVC of whoever runs the tests."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "DVC_", "GIT_"))}
        who = {
            f"GIT_{role}_{what}": "nobody@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        own = {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "DVC_SITE_CACHE_DIR": str(self.folder / "site"),
            "TRACE": str(self.folder / "trace"),
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }
        return kept | who | own

    def run(self, checkout: Path, *command: str) -> subprocess.CompletedProcess:
        options = {"capture_output": True, "text": True, "timeout": 120, "env": self.environment}
        return subprocess.run(command, cwd=checkout, **options)

    def do(self, checkout: Path, *command: str) -> str:
        done = self.run(checkout, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def dvc(self, checkout: Path, *arguments: str) -> str:
        return self.do(checkout, sys.executable, "-m", "dvc", *arguments)

    def ci_cached(self, checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
        return self.run(checkout.parent, sys.executable, str(SCRIPT), "--at", str(checkout), *arguments)

    def clone(self, project: Path) -> Path:
        """A fresh clone, and an empty trace."""
        (self.folder / "trace").write_text("")
        self.do(self.folder, "git", "clone", "-q", str(project), "clone")
        return self.folder / "clone"

    def ran(self) -> list[str]:
        return (self.folder / "trace").read_text().split()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A project that has run, with the .dvc/config of this repository."""
    person = Person(tmp_path_factory.mktemp("made"))
    project = person.folder / "project"
    project.mkdir()
    (project / "dvc.yaml").write_text(STAGES)
    (project / "words.txt").write_text("wine\nbread\n")
    (project / "title.txt").write_text("Shopping\n")
    (project / ".gitignore").write_text("/out/\n")
    person.do(project, "git", "init", "-q")
    person.dvc(project, "init", "-q")
    shutil.copy(ROOT / ".dvc" / "config", project / ".dvc" / "config")
    person.dvc(project, "repro", "-q")
    person.do(project, "git", "add", "--all")
    person.do(project, "git", "commit", "-q", "-m", "made")
    assert person.ran() == ["words", "title", "report"]
    return project


@pytest.fixture
def person(tmp_path) -> Person:
    return Person(tmp_path)


@pytest.fixture
def project(made, person) -> Path:
    return shutil.copytree(made, person.folder / "project")


def outcomes(said: str) -> dict[str, str]:
    """stage -> what ci_cached says became of it."""
    return dict(re.findall(r"^  (\w+) +(as in dvc\.lock|from the run-cache|run)$", said, re.MULTILINE))


def report(checkout: Path) -> str:
    return (checkout / "out" / "REPORT.md").read_text()


AS_MADE = {"words": "as in dvc.lock", "title": "as in dvc.lock", "report": "as in dvc.lock"}


def test_a_clone_takes_the_report_from_the_default_remote_and_runs_nothing(person, project):
    person.dvc(project, "push", "--run-cache", "-q")
    assert list((person.home / ".local/share/kvlab/remote/files").rglob("*"))
    clone = person.clone(project)
    done = person.ci_cached(clone, "--require-cached")
    assert done.returncode == 0, done.stderr
    assert report(clone) == report(project)
    assert person.ran() == []
    assert outcomes(done.stdout) == AS_MADE
    assert "3 stages: 3 as in dvc.lock, 0 from the run-cache, 0 run." in done.stdout
    assert "Here now: out/REPORT.md" in done.stdout
    assert [path.name for path in (clone / "out").iterdir()] == ["REPORT.md"], "what nobody asked for was downloaded"


@pytest.fixture(scope="module")
def s3(s3_server):
    """Address of an S3 server with one bucket: results."""
    import boto3

    keys = {"aws_access_key_id": "anybody", "aws_secret_access_key": "anything", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=s3_server, **keys).create_bucket(Bucket="results")
    return s3_server


def name_s3(person: Person, checkout: Path, address: str) -> None:
    """The commands of docs/pipeline.md."""
    person.dvc(checkout, "remote", "add", "--local", "--default", "lab", "s3://results/kvlab")
    person.dvc(checkout, "remote", "modify", "--local", "lab", "endpointurl", address)


def test_the_same_from_s3(person, project, s3):
    name_s3(person, project, s3)
    person.dvc(project, "push", "--run-cache", "-q")
    assert not person.home.exists() or not list(person.home.rglob("kvlab"))
    shutil.rmtree(project / ".dvc" / "cache")
    clone = person.clone(project)
    name_s3(person, clone, s3)
    done = person.ci_cached(clone, "--require-cached")
    assert done.returncode == 0, done.stderr
    assert report(clone) == "Shopping\nbread\nwine\n"
    assert person.ran() == []
    assert outcomes(done.stdout) == AS_MADE


def test_an_s3_server_that_is_not_there_is_one_line(person, project):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    name_s3(person, project, f"http://127.0.0.1:{port}")
    shutil.rmtree(project / "out")
    shutil.rmtree(project / ".dvc" / "cache")
    done = person.ci_cached(project)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and str(port) in done.stderr


def test_an_edited_stage_and_what_depends_on_it_are_run_and_named(person, project):
    person.dvc(project, "push", "--run-cache", "-q")
    clone = person.clone(project)
    (clone / "title.txt").write_text("Buy\n")
    done = person.ci_cached(clone)
    assert done.returncode == 0, done.stderr
    assert report(clone) == "Buy\nbread\nwine\n"
    assert person.ran() == ["title", "report"]
    assert outcomes(done.stdout) == {"words": "as in dvc.lock", "title": "run", "report": "run"}
    assert "3 stages: 1 as in dvc.lock, 0 from the run-cache, 2 run." in done.stdout


def test_require_cached_stops_before_an_edited_stage_is_run(person, project):
    person.dvc(project, "push", "--run-cache", "-q")
    clone = person.clone(project)
    (clone / "title.txt").write_text("Buy\n")
    done = person.ci_cached(clone, "--require-cached")
    assert done.returncode == 1
    assert person.ran() == []
    assert re.fullmatch(r"error: stage title would have to run: .*\n", done.stderr)
    assert not (clone / "out" / "REPORT.md").exists()


def test_inputs_that_were_run_elsewhere_are_found_in_the_run_cache(person, project):
    (project / "title.txt").write_text("Buy\n")
    person.dvc(project, "repro", "-q")
    person.dvc(project, "push", "--run-cache", "-q")
    clone = person.clone(project)
    (clone / "title.txt").write_text("Buy\n")
    # The dvc.lock of the clone is the committed one: only the run-cache knows the new title.
    done = person.ci_cached(clone, "--require-cached")
    assert done.returncode == 0, done.stderr
    assert report(clone) == "Buy\nbread\nwine\n"
    assert person.ran() == []
    expected = {"words": "as in dvc.lock", "title": "from the run-cache", "report": "from the run-cache"}
    assert outcomes(done.stdout) == expected


def test_the_results_of_an_earlier_commit_are_in_the_remote_too(person, project):
    before = report(project)
    (project / "title.txt").write_text("Buy\n")
    person.dvc(project, "repro", "-q")
    person.do(project, "git", "commit", "-q", "--all", "-m", "another title")
    person.dvc(project, "push", "--run-cache", "--all-commits", "-q")
    clone = person.clone(project)
    person.do(clone, "git", "checkout", "-q", "HEAD~1")
    done = person.ci_cached(clone, "--require-cached")
    assert done.returncode == 0, done.stderr
    assert report(clone) == before and person.ran() == []


def test_a_stage_that_fails_is_named_with_its_command(person, project):
    person.dvc(project, "push", "--run-cache", "-q")
    clone = person.clone(project)
    (clone / "dvc.yaml").write_text(STAGES.replace("cat title.txt", "false && cat title.txt"))
    done = person.ci_cached(clone)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "'title'" in done.stderr and "false && cat" in done.stderr
    assert outcomes(done.stdout)["words"] == "as in dvc.lock" and "report" not in outcomes(done.stdout)


@pytest.mark.parametrize("changed", [False, True], ids=["as committed", "edited"])
def test_a_remote_that_was_never_filled_is_one_line(person, project, changed):
    clone = person.clone(project)
    if changed:
        (clone / "title.txt").write_text("Buy\n")
    done = person.ci_cached(clone)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert str(person.home / ".local/share/kvlab/remote") in done.stderr and "--run-missing" in done.stderr
    assert person.ran() == []


def test_no_remote_at_all_is_one_line(person, project):
    clone = person.clone(project)
    person.dvc(clone, "remote", "default", "--unset")
    done = person.ci_cached(clone)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "none is set" in done.stderr


def test_run_missing_makes_what_is_nowhere_and_the_next_run_makes_nothing(person, project):
    clone = person.clone(project)
    done = person.ci_cached(clone, "--run-missing")
    assert done.returncode == 0, done.stderr
    assert outcomes(done.stdout)["words"] == "run"
    assert "words" in person.ran()
    assert report(clone) == report(project)
    shutil.rmtree(clone / "out")
    before = person.ran()
    again = person.ci_cached(clone, "--run-missing")
    assert outcomes(again.stdout) == AS_MADE and person.ran() == before
    assert report(clone) == report(project)


def test_an_unknown_stage_is_refused_with_the_nearest_name(person, project):
    done = person.ci_cached(project, "repord")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "did you mean 'report'?" in done.stderr


def test_a_stage_of_which_dvc_says_nothing_known_is_no_success(person, project):
    """As after a version of DVC that words its messages otherwise."""
    forget = "import ci_cached; del ci_cached.OUTCOMES[\"Stage '%s' didn't change, skipping\"]; ci_cached.main()"
    done = person.run(
        project, sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); {forget}"
    )
    assert done.returncode == 1
    assert "DVC did not say what became of report, title, words" in done.stderr

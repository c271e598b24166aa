"""The audit: its faults are many and named once, its page says what caught them, and it ends badly where one is not."""

from __future__ import annotations

import sys

import pytest

from kvlab.core.errors import Fault
from refusals import refused
from validation.audit import run
from validation.audit.files import PAGES, TABLES
from validation.audit.plant import Changes
from validation.audit.trial import PLANTS
from validation.audit.workspace import Workspace

CAUGHT = {"name": "a", "where": "files", "beyond": "", "when": "metrics", "caught": "StaleResult", "words": "it | was"}
SILENT = CAUGHT | {"name": "b", "when": "nothing", "caught": "", "words": ""}


def test_there_are_more_than_sixty_faults_of_the_running_chain():
    assert len(PLANTS) >= 60 and len(TABLES) + len(PAGES) >= 20
    assert len(PLANTS | TABLES | PAGES) == len(PLANTS) + len(TABLES) + len(PAGES)
    assert sum(bool(plant.beyond) for plant in PLANTS.values()) <= 3


class Recorded(Changes):
    """Changes that remember what they replaced."""

    def put(self, target, name, new):
        self.__dict__.setdefault("places", []).append((target, name, getattr(target, name)))
        super().put(target, name, new)


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_finds_what_it_changes(name):
    # what it replaces may be renamed, and a fault that is not in place would look like one that nothing catches
    with Recorded() as changes:
        PLANTS[name].apply(changes)
        assert changes.places
        assert all(getattr(target, attribute) is not was for target, attribute, was in changes.places)
    assert all(getattr(target, attribute) is was for target, attribute, was in changes.places)


def test_the_page_says_what_caught_what():
    page = run.page([CAUGHT, SILENT | {"beyond": "nobody can know"}], 60.0)
    assert "0 were refused by the job" in page and "1 by the reader of the job's files" in page
    assert "| a | files | the reader of its files | StaleResult | it &#124; was |\n| b |" in page
    assert "**b**: nobody can know." in page


@pytest.mark.parametrize(("row", "ends"), [(SILENT, True), (SILENT | {"beyond": "why"}, False), (CAUGHT, False)])
def test_a_fault_that_reaches_the_page_ends_the_audit(monkeypatch, tmp_path, row, ends):
    monkeypatch.setattr(Workspace, "prepare", lambda self: None)
    monkeypatch.setattr(run, "trial", lambda _workspace, _name: row)
    if ends:
        with refused(Fault, "fault.reached-page", "1 of 1", ": b;"):
            run.audit(tmp_path / "AUDIT.md", ["b"])
    else:
        run.audit(tmp_path / "AUDIT.md", ["b"])
    assert (tmp_path / "AUDIT.md").is_file() and (tmp_path / "AUDIT.json").is_file()


def test_an_error_of_the_plant_s_own_is_no_refusal(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = run.trial(Workspace(tmp_path), "bytes counted by half")
    assert (found["when"], found["caught"]) == ("nothing", "") and run.ENDED in found["words"]


@pytest.mark.nightly
@pytest.mark.engine
def test_faults_are_caught_for_real(tmp_path, monkeypatch, root):
    monkeypatch.chdir(root)
    workspace = Workspace(tmp_path)
    workspace.prepare()
    found = {name: run.trial(workspace, name) for name in ("half of the error undone", "a null floor")}
    assert [(one["when"], one["caught"]) for one in found.values()] == [
        ("job", "WitnessDisagrees"),
        ("metrics", "Fault"),
    ]

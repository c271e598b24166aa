"""The bench from end to end on a source small enough for a test, and what is written about it."""

import json

import polars as pl
import pytest

from kvlab.bench import divergence, page, published, run, sources, subjects
from kvlab.bench.subjects import Roster, Subject
from kvlab.params import Params
from kvlab.recipe import IDENTITY, HadamardStream, IntStream, KltStream, Recipe

EFFORT = run.Effort(rounds=2, threads=(1,), windows=1)


def small_roster():
    streams = {
        "klt 2": KltStream(bits=2),
        "hadamard 2": HadamardStream(bits=2),
        "int+center 3": IntStream(bits=3, center=True),
    }
    own = [Subject(label, int(label.split()[1]), Recipe(k=s, v=s)) for label, s in streams.items()]
    return Roster((Subject("identity", None, IDENTITY), *own), {"hqq": "hqq: not installed"})


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    out = tmp_path_factory.mktemp("codec")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "roster", lambda params: small_roster())
        patch.setattr(sources, "planted", lambda planted=sources.planted: planted(heads=1, tokens=256, head_dim=32))
        run.bench(Params.parse("params.yaml"), out, run.Inputs(), EFFORT)
    return out


def test_everything_is_written(benched):
    data = json.loads((benched / "bench.json").read_text())
    assert [source["name"] for source in data["sources"]] == ["planted"]
    scores = data["sources"][0]["scores"]
    assert {label: len(rows) for label, rows in scores.items()} == dict.fromkeys(scores, 2) and len(scores) == 4
    speed = data["sources"][0]["speed"]["klt 2"]["k"]
    assert set(speed) == {"encode", "decode", "write", "read"} and speed["read"]["1"]["value"] > 0
    for name in ("distance_planted.svg", "speed_planted.svg"):
        assert (benched / "figures" / name).read_text().startswith("<?xml")


def test_page_says_who_is_best_and_what_is_missing(benched):
    text = (benched / "BENCH.md").read_text()
    assert "hqq: not installed" in text and "requirements/bench.txt" in text
    best = next(line for line in text.splitlines() if line.startswith("| planted | K | 2 |"))
    assert "klt 2" in best
    assert "## Beside the published codec" not in text
    assert "KL was not measured" in text and "nan" not in text.lower()


def test_page_is_written_again_without_measuring(benched, tmp_path):
    data = json.loads((benched / "bench.json").read_text())
    page.write(data, tmp_path)
    assert (tmp_path / "BENCH.md").read_text() == (benched / "BENCH.md").read_text()


def test_kl_and_published_numbers_are_printed_when_there_are_any(benched, tmp_path):
    data = json.loads((benched / "bench.json").read_text())
    data["kl"] = {"klt 2": {"test": 0.002, "other": 0.003}, "hadamard 2": {"test": 0.02}}
    data["sources"][0]["name"] = "capture"
    source, rate = data["sources"][0], {"value": 60.0, "low": 50.0, "high": 70.0}
    theirs = {"bits": 4.3, "error_db": -10.0, "encode": 6.0, "decode": 20.0}
    ours = {"bits": 4.3, "error_db": -10.5, "encode": rate, "decode": rate}
    source["published"] = [{"label": "whitened", "stream": "k", "ours": ours, "theirs": theirs}]
    page.write(data, tmp_path)
    text = (tmp_path / "BENCH.md").read_text()
    sentence = next(line for line in text.splitlines() if line.startswith("- Up to 3 bits on test text"))
    assert "`klt 2`" in sentence and "`hadamard 2`" in sentence and "10 times as much" in sentence
    row = next(line for line in text.splitlines() if line.startswith("| whitened | K |"))
    assert "| 1.000 |" in row and "| -0.50 |" in row and "| 10.0 |" in row and "| 3.00 |" in row
    assert "klt 2 beside the first" in text and "| klt 2 | K |" in text


def test_published_settings_make_recipes():
    for line in published.LINES:
        recipe = line.recipe()
        assert recipe.k.variance_ratio == line.settings["variance_ratio"] and not recipe.v.whiten
    assert len({line.label for line in published.LINES}) == len(published.LINES)


def test_kl_comes_out_of_the_ladders_tables(monkeypatch, tmp_path):
    class Cell:
        label, text = "klt 2", "other"

    class Measured:
        cell, cell_id = Cell, "c"

    class Record:
        cells = (Measured,)

    (tmp_path / "job.json").write_text("{}")
    table = pl.DataFrame({"cell_id": ["c", "c"], "kl": [1.0, 3.0]})
    monkeypatch.setattr(divergence, "read_job", lambda path: (Record, table))
    assert divergence.of_ladder(tmp_path) == {"klt 2": {"other": 2.0}}


def test_a_subject_that_refuses_is_named_and_the_others_go_on(monkeypatch):
    who = (Subject("klt 2", 2, Recipe(k=KltStream(bits=2), v=KltStream(bits=2))), Subject("identity", None, IDENTITY))
    source = sources.planted(heads=1, tokens=128, head_dim=16)

    def refuse(self, *_):
        from kvlab.errors import CapabilityError

        if self.label == "klt 2":
            raise CapabilityError("not on this shape")
        return original(self, *_)

    original = subjects.Subject.coder
    monkeypatch.setattr(subjects.Subject, "coder", refuse)
    found = run.measure(source, who, Params.parse("params.yaml"), EFFORT)
    assert found["refused"] == {"klt 2": "not on this shape"}
    assert set(found["scores"]) == set(found["speed"]) == {"identity"}

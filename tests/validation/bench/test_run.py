"""The bench from end to end on a source small enough for a test, and what is written about it."""

import json

import numpy as np
import pytest

import embedded
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.klt import KltStream
from kvlab.core.errors import CapabilityError, MixedIdentity, StorageError, UserError
from kvlab.core.recipe import IDENTITY, Recipe
from refusals import refused
from validation.bench import page, published, run, sources, subjects
from validation.bench.subjects import BenchCodec, Roster

pytestmark = pytest.mark.full

EFFORT = run.Effort(rounds=2, threads=(1,))


def small_roster():
    streams = {
        "klt 2": KltStream(bits=2),
        "hadamard 2": HadamardStream(bits=2),
        "int+center 3": IntStream(bits=3, center=True),
    }
    own = [BenchCodec(label, int(label.split()[1]), Recipe(k=s, v=s)) for label, s in streams.items()]
    return Roster((BenchCodec("identity", None, IDENTITY), *own), {"hqq": "hqq: not installed"})


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    out = tmp_path_factory.mktemp("codec")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "roster", lambda params: small_roster())
        patch.setattr(sources, "planted", lambda planted=sources.planted: planted(heads=1, tokens=256, head_dim=32))
        run.bench(embedded.settings(), out, run.Inputs(), EFFORT)
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
    best = next(line for line in text.splitlines() if line.startswith("| planted | K | 2.5 |"))
    assert "klt 2" in best
    assert "## Beside the published codec" not in text
    assert "KL was not measured" in text and "nan" not in text.lower()


def test_page_is_written_again_without_measuring(benched, tmp_path):
    data = json.loads((benched / "bench.json").read_text())
    page.write(data, tmp_path)
    assert (tmp_path / "BENCH.md").read_text() == (benched / "BENCH.md").read_text()


def with_kl_and_published(benched):
    """What was benched, with KL and numbers of the published codec planted into it."""
    data = json.loads((benched / "bench.json").read_text())
    source = np.random.default_rng(0)
    base = source.uniform(0.5, 1.5, 12)  # of the windows, shared: a paired ratio scatters little
    planted = {("klt 2", "test"): (2.0, 0.002), ("klt 2", "other"): (2.0, 0.003), ("hadamard 2", "test"): (2.505, 0.02)}
    for (label, text), (bits, kl) in planted.items():
        windows = base * source.uniform(0.95, 1.05, 12)
        windows = (kl * windows / windows.mean()).tolist()
        data["kl"].setdefault(label, {})[text] = {"bits": bits, "windows": windows}
    source, rate = data["sources"][0], {"value": 60.0, "low": 50.0, "high": 70.0}
    theirs = {"bits": 4.3, "error_db": -10.0, "encode": 6.0, "decode": 20.0}
    ours = {"bits": 4.3, "error_db": -10.5, "encode": rate, "decode": rate}
    row = {"label": "whitened", "stream": "k", "theirs": theirs}
    source["whole_speed"] = {"klt 2": {"k": {"encode": rate, "decode": rate}}}
    source["published"] = [row | {"refused": "not here"}, row | {"label": "raw", "ours": ours}]
    return data


def test_kl_has_intervals_and_is_compared_on_the_same_windows(benched, tmp_path):
    data = with_kl_and_published(benched)
    page.write(data, tmp_path)
    text = (tmp_path / "BENCH.md").read_text()
    best = next(line for line in text.splitlines() if line.startswith("| test | 2.5 | klt 2 |"))
    assert "hadamard 2" in best and "| 10.00 [9." in best  # the paired interval, far narrower than both KLs'
    sentence = next(line for line in text.splitlines() if line.startswith("- On test text the KL of `klt 2`"))
    assert (
        "is 0.100" in sentence
        and "times that of `hadamard 2` (2.50 bits), the best other codec of the ladder" in sentence
    )
    assert "over the same 12 windows" in text and "| 0.00200 [0.001" in text
    data["kl"]["hadamard 2"]["test"]["windows"].pop()
    with refused(MixedIdentity, None, "scored windows"):
        page.write(data, tmp_path)


def test_a_codec_past_the_budget_is_not_compared(benched, tmp_path):
    data = with_kl_and_published(benched)
    data["kl"]["hadamard 2"]["test"]["bits"] = 2.52
    page.write(data, tmp_path)
    assert "the best other codec" not in (tmp_path / "BENCH.md").read_text()


def test_published_numbers_are_printed_with_every_ratio_and_every_refusal(benched, tmp_path):
    page.write(with_kl_and_published(benched), tmp_path)
    text = (tmp_path / "BENCH.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| raw | K |"))
    assert "| 1.000 |" in row and "| -0.50 |" in row and "| 10.0 |" in row and "| 3.00 |" in row
    assert "klt 2 (published: whitened) | K |" in text and "| klt 2 | K |" in text
    assert "- whitened (K): not here" in text
    assert "it encodes 10.0 and decodes 3.00 times as fast" in text


def test_published_settings_make_recipes():
    for line in published.LINES:
        recipe = line.recipe()
        assert recipe.k.variance_ratio == line.settings["variance_ratio"] and not recipe.v.whiten
    assert len({line.label for line in published.LINES}) == len(published.LINES)


def test_published_numbers_are_those_that_were_measured():
    lines = {(line.stream, line.name): line for line in published.LINES}
    recipe = lines["k", "whitened, mse, randomized, variance_ratio 0.95, T 2"]
    assert recipe.numbers() == {"bits": 4.30, "error_db": pytest.approx(-10.175), "encode": 7, "decode": 28}
    assert abs(recipe.numbers()["error_db"] + 9.96) < 0.25  # of all six layers, of which these are two
    full = lines["v", "raw, mse, exact, variance_ratio 1, shared basis"]
    assert full.numbers() == {"bits": 4.63, "error_db": pytest.approx(-15.77, abs=0.01), "encode": 4, "decode": 10}


@pytest.mark.parametrize(
    "effort", [{"rounds": 0}, {"threads": ()}, {"threads": (0,)}, {"windows": 1}, {"windows": 999}]
)
def test_effort_that_measures_nothing_is_refused(tmp_path, effort):
    with pytest.raises(UserError):
        run.bench(embedded.settings(), tmp_path, run.Inputs(), run.Effort(**effort))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["capture", "sigma", "tensors", "ladder", "windows"])
def test_every_input_is_opened_before_anything_is_measured(tmp_path, tiny_params, monkeypatch, name):
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured first"))
    with pytest.raises(UserError) as raised:
        run.bench(tiny_params, tmp_path / "out", run.Inputs(**{name: tmp_path / "none"}), EFFORT)
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        run.bench(embedded.settings(), tmp_path / "file" / "out", run.Inputs(), EFFORT)


def test_what_was_measured_stays_when_the_kl_fails(tmp_path, tiny_params, tiny_windows, monkeypatch):
    def fail(*_):
        raise CapabilityError("no engine")

    monkeypatch.setattr(run, "roster", lambda params: small_roster())
    monkeypatch.setattr(run, "measure", lambda source, *_: {"name": source.name, "refused": {}})
    monkeypatch.setattr(run.divergence, "of_rivals", fail)
    with pytest.raises(CapabilityError):
        run.bench(tiny_params, tmp_path, run.Inputs(windows=tiny_windows), EFFORT)
    assert [source["name"] for source in json.loads((tmp_path / "bench.json").read_text())["sources"]] == ["planted"]


def test_a_subject_that_refuses_is_named_and_the_others_go_on(monkeypatch):
    who = (
        BenchCodec("klt 2", 2, Recipe(k=KltStream(bits=2), v=KltStream(bits=2))),
        BenchCodec("identity", None, IDENTITY),
    )
    source = sources.planted(heads=1, tokens=128, head_dim=16)

    def refuse(self, *_):
        if self.label == "klt 2":
            raise CapabilityError("not on this shape")
        return original(self, *_)

    original = subjects.BenchCodec.coder
    monkeypatch.setattr(subjects.BenchCodec, "coder", refuse)
    found = run.measure(source, who, embedded.settings(), EFFORT)
    assert found["refused"] == {"klt 2": "not on this shape"}
    assert set(found["scores"]) == set(found["speed"]) == {"identity"}

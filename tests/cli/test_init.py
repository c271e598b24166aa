"""`kvlab init`: a params.yaml for somebody's own model."""

from __future__ import annotations

import json
import re

import pytest

from kvlab.cli import main as cli
from kvlab.core.errors import ParamsError, StorageError, UnknownName
from kvlab.core.paramfile import read_yaml
from kvlab.core.recipe import ENGINES
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies import init
from kvlab_pipeline.studies.settings import by_model
from refusals import refused


@pytest.fixture
def model(tmp_path):
    """A folder of a model with four layers and 300 positions."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "max_position_embeddings": 300}))
    return folder


def test_the_repositorys_own_file_is_what_it_writes_for_its_models(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    init.write(tmp_path / "params.yaml", "models/smollm2-135m")
    written, own = ((place / "params.yaml").read_text() for place in (tmp_path, root))
    before, listed, after = re.split(r"(?<=\nmodels:\n)(.*?)(?=^corpus:)", own, maxsplit=1, flags=re.S | re.M)
    assert listed.startswith("- path: models/smollm2-135m\n")
    assert written == f"{before}- path: models/smollm2-135m\n{after}"
    assert len(own.splitlines()) < 125


@pytest.mark.parametrize("engines", [("hf",), ("vllm",), ("hf", "vllm")])
def test_it_fits_the_model_the_engines_and_the_windows(model, tmp_path, engines):
    out = tmp_path / "params.yaml"
    init.write(out, str(model), engines=engines, windows=8, source="a: strange #text*.txt")
    (params,) = by_model(read_yaml(out)).values()
    plan.check(params)
    assert params.engines == engines and params.calibration.engines == engines[:1]
    assert (params.windows.test, params.windows.other, params.layers.windows) == (8, 8, 4)
    assert params.model.n_layers == 4 and params.windows.length < 300
    assert params.corpus.source == "a: strange #text*.txt"


@pytest.mark.parametrize(
    ("changes", "error", "data"),
    [
        ({"engines": ("hff",)}, UnknownName, ("engine 'hff'", ", ".join(ENGINES), "did you mean 'hf'")),
        ({"windows": 1}, ParamsError, ("'windows.test' is 1", "greater than or equal to 2")),
        ({"model": "no/such/model"}, ParamsError, ("directory 'no/such/model'",)),
        ({"model": "a/hub-id"}, ParamsError, ("'a/hub-id'", "`revision`")),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(model, tmp_path, changes, error, data):
    out = tmp_path / "params.yaml"
    with refused(error, None, *data):
        init.write(out, **{"model": str(model)} | changes)
    assert not out.exists()


def test_a_model_without_room_for_a_window_is_refused(model, tmp_path):
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "max_position_embeddings": 100}))
    with refused(ParamsError, None, "100 positions", "at least 137"):
        init.write(tmp_path / "params.yaml", str(model))


def test_no_file_is_written_over(model, tmp_path):
    out = tmp_path / "params.yaml"
    out.write_text("mine")
    with refused(StorageError, "storage.exists", out, "--out"):
        init.write(out, str(model))
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("out", "checkout", "last"),
    [
        ("params.yaml", False, "next: kvlab params --params params.yaml"),
        ("params.yaml", True, "; to run it: make sync findings"),
        ("it's mine.yaml", True, """; to run it: mv 'it'"'"'s mine.yaml' params.yaml && make sync findings"""),
    ],
)
def test_it_says_what_to_type_next(model, tmp_path, monkeypatch, capsys, out, checkout, last):
    monkeypatch.chdir(tmp_path)
    if checkout:
        (tmp_path / "dvc.yaml").touch()
    cli.main(["init", "--model", str(model), "--out", out])
    (line,) = capsys.readouterr().out.splitlines()
    assert (tmp_path / out).is_file() and line.endswith(last)

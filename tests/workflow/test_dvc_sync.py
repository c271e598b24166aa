"""dvc_sync on stages written by hand: what it derives and what it refuses. No Snakemake involved."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

SCRIPT = Path(__file__).resolve().parents[2] / "workflow" / "scripts" / "dvc_sync.py"
DOCUMENT = """\
stages:
  code:
    outs:
      - results/code
  fit:
    desc: by hand  # kept
    outs:
      - calib/fit
  draw:
    outs:
      - results/picture.svg
    metrics:
      - results/summary.json
"""


@pytest.fixture(scope="module")
def dvc_sync():
    spec = importlib.util.spec_from_file_location("dvc_sync", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def stages(dvc_sync):
    code = dvc_sync.Stage(["code"], {CODE.format("code.rules")}, {"src"}, set(), {"results/code"})
    made, of_fit = {"calib/fit/a.json"}, {CODE.format("fit.rules"), CODE.format("fit")}
    fit = dvc_sync.Stage(["fit", "fit_one"], of_fit, set(), {"models/a"}, made, {"bits"})
    inputs = {"data/words.txt", "calib/fit/a.json", "results/summary.json"}
    outputs = {"results/picture.svg", "results/summary.json"}
    of_draw = {CODE.format("draw")}
    draw = dvc_sync.Stage(["draw"], of_draw, inputs, set(), outputs, {"title", "bits"})
    return {"code": code, "fit": fit, "draw": draw}


CODE = "results/code/{}.txt"
MODELS = {"${models[0].path}": "models/a", "${models[1].path}": "models/b"}
TRACKED = {"data/words.txt", "src"}


def document():
    return YAML().load(DOCUMENT)


def test_a_stage_gets_its_command_dependencies_and_parameters(dvc_sync, stages):
    draw = dvc_sync.synced(document(), stages, TRACKED, MODELS)["stages"]["draw"]
    assert draw["cmd"] == "snakemake --nolock --allowed-rules draw -- draw"
    assert draw["deps"] == ["calib/fit", "data/words.txt", "results/code/draw.txt"]
    assert draw["params"] == ["bits", "title"]
    assert list(draw) == ["cmd", "deps", "params", "outs", "metrics"]


def test_a_model_is_named_by_its_place_in_the_list(dvc_sync, stages, tmp_path, monkeypatch):
    fit = dvc_sync.synced(document(), stages, TRACKED, MODELS)["stages"]["fit"]
    assert fit["deps"] == ["${models[0].path}", "results/code/fit.rules.txt", "results/code/fit.txt"]
    (tmp_path / "params.yaml").write_text("models:\n- path: ./models//a/\n- path: some/hub-id\n")
    monkeypatch.chdir(tmp_path)
    assert dvc_sync.model_names() == {"${models[0].path}": "models/a", "${models[1].path}": "some/hub-id"}


def test_what_is_written_by_hand_stays(dvc_sync, stages, tmp_path):
    YAML().dump(dvc_sync.synced(document(), stages, TRACKED, MODELS), tmp_path / "dvc.yaml")
    assert "desc: by hand  # kept" in (tmp_path / "dvc.yaml").read_text()


def test_a_second_run_changes_nothing_and_a_stale_dependency_is_named(dvc_sync, stages):
    once = dvc_sync.synced(document(), stages, TRACKED, MODELS)
    again = dvc_sync.synced(YAML().load(DOCUMENT) | {"stages": once["stages"]}, stages, TRACKED, MODELS)
    assert dvc_sync.differences(once, again) == []
    stale = YAML(typ="safe").load(DOCUMENT)
    stale["stages"] = {name: dict(entry) for name, entry in once["stages"].items()}
    stale["stages"]["draw"]["deps"] = ["data/gone.txt", "data/words.txt", "results/code/draw.txt"]
    assert dvc_sync.differences(stale, once) == ["draw.deps: + ['calib/fit'] - ['data/gone.txt']"]


def test_the_code_of_a_stage_is_its_records_and_the_stage_that_writes_them_reads_the_sources(dvc_sync, stages):
    synced = dvc_sync.synced(document(), stages, TRACKED, MODELS)["stages"]
    assert synced["code"]["deps"] == ["src"]  # and none of what it writes itself
    named = {dep for name in ("fit", "draw") for dep in synced[name]["deps"] if dep.startswith("results/code")}
    assert named == stages["fit"].code | stages["draw"].code


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda stages: stages["fit"].outputs.clear(), "declares calib/fit in stage fit, but no rule makes it"),
        (lambda stages: stages["fit"].inputs.add("notes.txt"), "which no stage makes and git does not track"),
        (lambda stages: stages["fit"].rules.remove("fit"), "there is no rule 'fit'"),
    ],
)
def test_a_contradiction_is_refused(dvc_sync, stages, mistake, message):
    mistake(stages)
    with pytest.raises(dvc_sync.Mismatch) as refusal:
        dvc_sync.synced(document(), stages, TRACKED, MODELS)
    assert message in str(refusal.value)


def rule(name, *output):
    return SimpleNamespace(name=name, output=output)


def test_a_rule_belongs_to_the_stage_whose_outs_it_makes(dvc_sync):
    outs = dvc_sync.outs_of(document())
    assert dvc_sync.stage_of(rule("fit_one", "calib/fit/a.json", "calib/fit/b.json"), outs) == "fit"
    assert dvc_sync.stage_of(rule("drawn", "results/summary.json"), outs) == "draw"
    assert dvc_sync.stage_of(rule("fit"), outs) == "fit" and dvc_sync.stage_of(rule("all"), outs) is None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (["calib/loose.json"], "rule fit_one makes calib/loose.json; declare it under `outs` of a stage"),
        (["calib/fitted.json"], "rule fit_one makes calib/fitted.json; declare it"),
        (["calib/fit/a.json", "results/summary.json"], "makes files of the stages draw, fit; split it"),
    ],
)
def test_a_rule_of_no_stage_or_of_two_is_refused(dvc_sync, output, message):
    with pytest.raises(dvc_sync.Mismatch) as refusal:
        dvc_sync.stage_of(rule("fit_one", *output), dvc_sync.outs_of(document()))
    assert message in str(refusal.value)

"""A user's verbs take the folder of a model and no params.yaml; a hub id is told what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from cache.pages.test_worker import config as served_config
from kvlab import Cache
from kvlab.cache.vllm import worker
from kvlab.core import hub
from kvlab.core.errors import CalibrationMismatch
from refusals import refused_line

TEXT = "lomi shavo pel driren tuan kalo mi. " * 6


@pytest.fixture
def run(tmp_path, monkeypatch, line):
    """Exit code, stdout and stderr of a verb, in a folder that holds a text and no params.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text(TEXT)
    return line


@torch.no_grad()
def exact(model: Path) -> dict[str, torch.Tensor]:
    """V of the text as transformers itself computes it; K is stored after its rotary embedding there."""
    ids = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt")["input_ids"]
    cache = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids, use_cache=True).past_key_values
    return {f"layer_{n}_{s}": getattr(layer, f"{name}s")[0]
            for n, layer in enumerate(cache.layers) for s, name in (("k", "key"), ("v", "value"))}  # fmt: skip


def apart(decoded: dict, wanted: dict, stream: str) -> float:
    """Relative squared error of all layers' K or V."""
    names = [name for name in wanted if name.endswith(stream)]
    return max(float((decoded[n] - wanted[n]).square().sum() / wanted[n].square().sum()) for n in names)


def test_the_cache_of_a_text_is_coded_and_comes_back(run, tiny_model, tmp_path):
    text = tiny.write_text(tmp_path / "calibration.txt", seed=1)
    model = ("--model", tiny_model)
    for bits in (2, 6):
        small = ("--context", 64, "--windows", 6, "--text", text, "--bits", bits)
        assert run("calibrate", *model, *small, "--out", f"klt{bits}.kv")[0] == 0
        code, said, err = run("encode", *model, "--recipe", f"klt{bits}.kv", "--text", "notes.txt", "--out", "n.kvls")
        assert code == 0, err
        assert f"{Path('n.kvls').stat().st_size} bytes" in said and run("inspect", "--stream", "n.kvls")[1] == said
        words = ("--recipe", f"klt{bits}.kv", "--stream", "n.kvls", "--out", f"{bits}.safetensors")
        assert run("decode", *model, *words) == (0, "", "")
    wanted = exact(tiny_model)
    two, six = (load_file(f"{bits}.safetensors") for bits in (2, 6))
    assert two.keys() == wanted.keys() and all(two[n].shape == wanted[n].shape for n in wanted)
    assert 0 < apart(six, wanted, "v") < 0.01 < apart(two, wanted, "v") < 0.3


def test_k_less_its_mean_by_position_is_for_what_serves(run, tiny_model, tmp_path, monkeypatch):
    """`klt` with rotary: after: in pages and in a Cache; one line wherever else its file is given, nothing written."""
    text = tiny.write_text(tmp_path / "calibration.txt", seed=1)
    model, small = ("--model", tiny_model), ("--context", 64, "--windows", 6, "--text", text, "--bits", 3)
    code, _, err = run("calibrate", *model, *small, "--rotary", "aftr", "--out", "klt3.kv")
    assert code == 2 and "did you mean 'after'" in err and not Path("klt3.kv").exists()
    files = "--out", "klt3.kv", "--decoder", "decoder.kv"
    assert run("calibrate", *model, *small, "--rotary", "after", *files)[0] == 0
    model_here = AutoModelForCausalLM.from_pretrained(tiny_model)
    cache = Cache(model_here, "klt3.kv")
    with torch.no_grad():
        for ids in torch.arange(1, 30)[None].split([20, 1, 8], dim=1):
            model_here(ids, past_key_values=cache)
    assert cache.check() and cache.bits_per_value > 3
    with pytest.raises(CalibrationMismatch) as found:
        Cache(model_here, "decoder.kv")
    assert found.value.code == "calibration.decoder-only"
    for file in ("klt3.kv", "decoder.kv"):
        asked = ("--recipe", file, "--text", "notes.txt", "--out", "n.kvls")
        code, said, err = run("encode", *model, *asked)
        said_last = err.splitlines()[-1]
        assert (code, said) == (2, "") and "KVLAB_PAGES" in said_last and "rotary: before" in said_last
    assert not Path("n.kvls").exists()
    monkeypatch.setenv("KVLAB_PAGES", str(Path("klt3.kv").absolute()))
    served = worker.made_ready(served_config(tiny_model), worker.read_recipe("KVLAB_PAGES"), by_position=True)
    assert served.recipe.rotary == "after"
    assert not served.recipe.k.escape and not served.recipe.v.escape
    with pytest.raises(CalibrationMismatch) as found:
        worker.made_ready(served_config(tiny_model), worker.read_recipe("KVLAB_PAGES"))
    assert found.value.code == "calibration.pre-rope-only"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recipe_without_a_calibration_needs_no_params_either(run, tiny_model, dtype):
    model = ("--model", tiny_model)
    code, _, err = run("recipe", *model, "--codec", "identity", "--out", "r.json")
    assert (code, err) == (0, ""), err
    assert (
        run("encode", *model, "--recipe", "r.json", "--text", "notes.txt", "--out", "n.kvls", "--dtype", dtype)[0] == 0
    )
    assert run("decode", *model, "--recipe", "r.json", "--stream", "n.kvls", "--out", "n.safetensors")[0] == 0
    with safe_open("n.safetensors", "pt") as file:
        assert json.loads(file.metadata()["kvlab"])["rotary"] == "before"
        assert str(file.get_tensor("layer_0_v").dtype) == f"torch.{dtype}"
    if dtype == "float32":
        found, wanted = load_file("n.safetensors"), exact(tiny_model)
        assert apart(found, wanted, "v") < 1e-10 and apart(found, wanted, "k") > 0.1  # K was turned
        assert torch.allclose(found["layer_0_k"][:, 0], wanted["layer_0_k"][:, 0], atol=1e-5)  # but at position 0


def test_a_codec_after_the_rotary_embedding_gets_k_after_it(run, tiny_model):
    model = ("--model", tiny_model)
    assert run("recipe", *model, "--codec", "kivi", "--bits", 8, "--out", "r.json")[0] == 0
    data = json.loads(Path("r.json").read_text())
    data["recipe"]["rotary"] = "after"
    Path("r.json").write_text(json.dumps(data))
    assert run("encode", *model, "--recipe", "r.json", "--text", "notes.txt", "--out", "n.kvls")[0] == 0
    assert run("decode", *model, "--recipe", "r.json", "--stream", "n.kvls", "--out", "n.safetensors")[0] == 0
    with safe_open("n.safetensors", "pt") as file:
        assert json.loads(file.metadata()["kvlab"])["rotary"] == "after"
    found, wanted = load_file("n.safetensors"), exact(tiny_model)
    assert 0 < apart(found, wanted, "k") < 1e-3 and 0 < apart(found, wanted, "v") < 1e-3


def test_bits_of_a_recipe_can_be_chosen(run, tiny_model):
    for words, bits in (((), (4, 4)), (("--bits", 3), (3, 3)), (("--bits", 3, "--v-bits", 2), (3, 2))):
        assert run("recipe", "--model", tiny_model, "--codec", "int", *words, "--out", "r.json")[0] == 0
        found = json.loads(Path("r.json").read_text())["recipe"]
        assert (found["k"]["bits"], found["v"]["bits"]) == bits
    code, _, err = run("recipe", "--model", tiny_model, "--codec", "studied", "--out", "s.json")
    assert code == 2 and "params.yaml" in err and not Path("s.json").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--text", "notes.txt"), "name the model: --model DIR"),
        (("--text", "notes.txt", "--model", "reference"), "there is no params.yaml here that could list it"),
        (("--text", "notes.txt", "--model", "."), "has no config.json"),
        (("--text", "notes.txt", "--model", "{model}", "--window", 0), "--window goes with --capture"),
        (("--text", "notes.txt", "--model", "{model}", "--bits", 3), "are its recipe's"),
        (("--text", "long.txt", "--model", "{model}"), "allowed: 2 to 255"),
        (("--text", "notes.txt", "--model", "Someone/model"), "hf download Someone/model"),
    ],
)
def test_what_cannot_be_encoded_is_one_line(run, tiny_model, words, told):
    assert run("recipe", "--model", tiny_model, "--codec", "fp8", "--out", "r.json")[0] == 0
    Path("long.txt").write_text(TEXT * 40)
    words = [str(word).format(model=tiny_model) for word in words]
    refused_line(run("encode", "--recipe", "r.json", "--out", "x.kvls", *words), told)
    assert not Path("x.kvls").exists()


# ---------------------------------------------------------------------------------------- hub ids


def test_a_hub_id_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert hub.reads_as_id("Qwen/Qwen2.5-0.5B")
    for path in ("models/refrence", "./models", "/models/x", "a/b/c", "model"):
        assert not hub.reads_as_id(path), path


VERBS = {
    "measure": ("measure", "{id}", "--text", "notes.txt"),
    "speculate": ("speculate", "{id}", "--text", "notes.txt"),
    "calibrate": ("calibrate", "--model", "{id}", "--out", "x.kv"),
    "snapshot save": ("snapshot", "save", "x.kvs", "--model", "{id}", "--text", "notes.txt"),
    "snapshot restore": ("snapshot", "restore", "x.kvs", "--model", "{id}", "--text", "notes.txt"),
    "recipe": ("recipe", "--model", "{id}", "--codec", "fp8", "--out", "r.json"),
    "eval": ("eval", "--model", "{id}", "--task", "ruler_v1", "--engine", "hf", "--codec", "fp8", "--out", "x"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("cached", [False, True])
def test_a_hub_id_is_no_missing_directory(run, tmp_path, monkeypatch, verb, cached):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    copy = tmp_path / "hub" / "models--Someone--model-7b" / "snapshots" / "0123abc"
    if cached:
        copy.mkdir(parents=True)
        (copy / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    err = refused_line(run(*(word.format(id="Someone/model-7b") for word in VERBS[verb])))
    assert "Hugging Face hub" in err and (str(copy) in err) == cached
    assert ("hf download Someone/model-7b" in err and "--revision" in err) != cached
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unpinned_hub_id_is_told_its_revisions(run, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "the local cache holds none" in run("init", "--model", "Someone/model-7b")[2]
    copy = tmp_path / "hub" / "models--Someone--model-7b" / "snapshots" / "0123abc"
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    code, out, err = run("init", "--model", "Someone/model-7b")
    assert (code, out) == (2, "") and "the local cache holds 0123abc" in err and not Path("params.yaml").exists()


def test_a_file_of_a_model_is_no_folder(run, tiny_model):
    code, _, err = run("measure", tiny_model / "model.safetensors", "--text", "notes.txt")
    assert code == 2 and "is a file; give the folder of a Hugging Face model" in err

"""Every verb refuses a folder that is not quite a model: one line, exit code 2, nothing written."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from kvlab.cache.files.recipe import read_recipe_file
from kvlab.cli import main as cli
from kvlab.codecs.recipes import named_recipe

pytestmark = pytest.mark.engine
K1 = "model.layers.1.self_attn.k_proj"
SMALL = "--context 64 --windows 4"
VERBS = {
    "measure": f"measure {{model}} --codec hadamard --text {{text}} --eval 32 --json {{out}} {SMALL}",
    "measure without a witness": f"measure {{model}} --codec int --text {{text}} --no-witness --json {{out}} {SMALL}",
    "measure a mechanism": f"measure {{model}} --text {{text}} --mechanism window --json {{out}} {SMALL}",
    "calibrate": f"calibrate --model {{model}} --codec hadamard+center --text {{text}} --out {{out}}.kv {SMALL}",
    "calibrate on docstrings": f"calibrate --model {{model}} --codec klt --out {{out}}.kv {SMALL}",
    "calibrate in vLLM": f"calibrate --model {{model}} --codec klt --engine vllm --out {{out}}.kv {SMALL}",
    "calibrate nothing": "calibrate --model {model} --codec hadamard --out {out}.kv",
    "eval": "eval --model {model} --task ruler_v1 --context-tokens 200 --engine hf --recipe {recipe} --out {out}",
    "snapshot save": "snapshot save {out}.kvs --model {model} --text {text} --chunk-tokens 16",
    "snapshot restore": "snapshot restore {text} --model {model} --text {text} --mode consume",
    "speculate": "speculate {model} --text {text} --context 64 --tokens 8 --json {out}",
    "a job of the pipeline": "step corpus --params {params} --out {out}.safetensors",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return tiny.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A codec that needs no calibration, as a file."""
    out = tmp_path_factory.mktemp("recipe") / "recipe.json"
    out.write_text(json.dumps({"recipe": {"k": {"codec": "identity"}, "v": {"codec": "identity"}}}))
    return out


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


@pytest.fixture
def run(folder, text, recipe, tiny_params, tmp_path, line, monkeypatch, root):
    """Exit code and last line of stderr of a line of `VERBS`, on the folder's model unless another is named."""
    monkeypatch.chdir(root)
    monkeypatch.setattr("kvlab.engines.hf.engine.HFEngine.__init__", lambda *_: pytest.fail("an engine was started"))
    out = tmp_path / "out"
    out.mkdir()

    def verb(words: str, model: Path = folder) -> tuple[int, str]:
        params = tiny_params.model_copy(update={"model": tiny_params.model.model_copy(update={"path": str(model)})})
        names = {"model": model, "text": text, "recipe": recipe, "out": out / "x", "params": params.model_dump_json()}
        code, _, err = line(*(word.format_map(names) for word in words.split()))
        assert "Traceback" not in err and not list(out.iterdir())
        return code, err.splitlines()[-1]

    return verb


def spoil(folder: Path, change) -> None:
    found = change(load_file(folder / "model.safetensors"))
    save_file({name: x.clone() for name, x in found.items()}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_bias_is_named_by_every_verb(verb, folder, run):
    """transformers puts zeros there, and so did the witness."""
    spoil(folder, lambda tensors: {name: x for name, x in tensors.items() if name != f"{K1}.bias"})
    code, err = run(VERBS[verb])
    assert code == 2 and f"{K1}.bias [64] is missing" in err


@pytest.mark.parametrize("verb", VERBS)
def test_eight_bits_with_scales_beside_them_are_refused_by_every_verb(verb, folder, run):
    eight = {f"{K1}.weight": torch.ones(64, 128).to(torch.float8_e4m3fn), f"{K1}.weight_scale": torch.ones(1)}
    spoil(folder, lambda tensors: tensors | eight)
    code, err = run(VERBS[verb])
    assert code == 2 and f"quantised ({K1}.weight is F8_E4M3, beside {K1}.weight_scale)" in err


@pytest.mark.parametrize("verb", VERBS)
def test_a_rotary_embedding_that_there_is_not_is_named_by_every_verb(verb, folder, run):
    tiny.edit(folder / "config.json", rope_parameters={"rope_type": "fancy"})
    code, err = run(VERBS[verb])
    assert code == 2 and "rope_type" in err and "'fancy'; allowed: default, linear" in err


READERS = [verb for verb in VERBS if verb not in ("calibrate nothing", "snapshot restore")]


@pytest.mark.parametrize("verb", READERS)
def test_every_verb_that_reads_a_text_needs_a_tokenizer(verb, folder, run):
    """Without one transformers makes one up, by which every text is the token 0 over and over."""
    (folder / "tokenizer.json").unlink()
    code, err = run(VERBS[verb])
    assert code == 2 and "has no tokenizer" in err


@pytest.mark.parametrize("verb", READERS)
def test_every_verb_that_reads_a_text_needs_an_embedding_of_every_token(verb, run, tmp_path):
    code, err = run(VERBS[verb], tiny.write_model(tmp_path / "small", vocab_size=300))
    assert code == 2 and "has token 319" in err and "embeds 0 to 299" in err


@pytest.mark.parametrize(
    ("verb", "named"),
    [
        *product(
            [verb for verb in VERBS if verb not in ("eval", "a job of the pipeline")],
            ["a GGUF file", "a folder of one", "no JSON", "no UTF-8"],
        ),
        *product(["measure", "speculate"], ["nothing", "a hub id"]),
    ],
)
def test_what_is_no_folder_of_a_model_is_told_what_to_give(verb, named, run, folder, tmp_path):
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf/model-q4.gguf"
    file.write_bytes(b"GGUF")
    if named in ("no JSON", "no UTF-8"):
        (folder / "config.json").write_bytes({"no JSON": b"{", "no UTF-8": b"{\xff}"}[named])
    model, words = {
        "a GGUF file": (
            file,
            f"model; make one of model-q4.gguf with `kvlab weights {file}",
        ),
        "a folder of one": (file.parent, f"`kvlab weights {file} --out NEW`"),
        "nothing": (tmp_path / "coyp", "does not exist; did you mean"),
        "a hub id": (Path("owner/name"), "`hf download owner/name`"),
        "no JSON": (folder, "no JSON in UTF-8"),
        "no UTF-8": (folder, "no JSON in UTF-8"),
    }[named]
    code, err = run(VERBS[verb], model)
    assert code == 2 and words in err


@pytest.mark.parametrize("blank", [200, 64])
@pytest.mark.parametrize("verb", ["measure", "measure a mechanism", "calibrate", "speculate"])
def test_a_window_of_blank_lines_is_named(verb, blank, run, tmp_path, text):
    """K and V of one token are all alike, so that no codec is heard; that was told as a hook that does not work."""
    file = tmp_path / "blank.txt"
    file.write_text("\n" * blank + text.read_text())
    code, err = run(VERBS[verb].replace("{text}", str(file)))
    assert code == 2 and "window 0 of" in err
    assert "64 times and nothing else" in err or "96 times and nothing else" in err


def test_a_calibration_keeps_the_tokens_exact_that_it_was_told_to_keep(tiny_model, tmp_path, run):
    out, line = tmp_path / "kept.kv", "calibrate --model {model} --codec hadamard --out {out}"
    for said, kept in (("--sink 4 --recent 128", {"sink": 4, "recent": 128}), ("", {})):
        cli.main([*line.format(model=tiny_model, out=out).split(), *said.split()])
        assert read_recipe_file(out).recipe == named_recipe("hadamard", bits=4, **kept)
    code, err = run(f"{line}.kv --recent 65537")
    assert code == 2 and "65537" in err and "65536" in err


def test_windows_that_are_nearly_blank_are_measured(tiny_model, text, tmp_path, capsys):
    """Whether a codec is heard is asked where the tokens differ most, which the first window need not be."""
    file, out = tmp_path / "blank.txt", tmp_path / "found.json"
    file.write_text("\n" * 63 + text.read_text())
    line = f"measure {tiny_model} --codec hadamard --text {file} --context 64 --eval 32 --windows 3 --json {out}"
    cli.main(line.split())
    assert json.loads(out.read_text())["rows"][1]["kl"]["value"] > 0


@pytest.mark.parametrize("named", ["eager", "flash_attention_2"])
def test_an_attention_that_the_config_names_is_not_what_runs(named, folder, text, tmp_path, capsys):
    """It ran for all that sdpa was asked for: the witness disagreed, or a package was missing."""
    out = tmp_path / "found.json"
    tiny.edit(folder / "config.json", _attn_implementation=named)
    line = f"measure {folder} --codec hadamard --text {text} --context 64 --eval 32 --windows 2 --json {out}"
    cli.main(line.split())
    assert json.loads(out.read_text())["witnessed"]

"""A model that goes through a GGUF file comes back: the same logits, the same ids; what is not known is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from kvlab.cli import main as cli
from kvlab.core.errors import ModelError
from kvlab.core.origin import ORIGIN, read_origin
from kvlab.text.corpus import bos
from kvlab.weights.convert import convert
from kvlab.weights.gguf_file import GgufFile
from kvlab.weights.named import make_own
from refusals import refused
from weights.gguf_files import CONFIGS, random_model, write


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each architecture, and the model that it is of."""
    folder, found = tmp_path_factory.mktemp("gguf"), {}
    for name in CONFIGS:
        model = random_model(name)
        found[name] = write(folder / f"{name}.gguf", name, model), model
    return found


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_of_bfloat16_weights_comes_back_bit_for_bit(architecture, files, tmp_path):
    path, model = files[architecture]
    convert(GgufFile(path), tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(40)[None] % 300
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6 and config["dtype"] == "bfloat16" and "quantization_config" not in config
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert ("lm_head.weight" in stored.keys()) is not model.config.tie_word_embeddings  # noqa: SIM118


def test_quantised_weights_are_the_products_that_the_file_says(tmp_path):
    """Of Q8_0, 32 values of a row share a float16 scale: the formula, written out."""
    model = random_model("qwen2")
    path = write(tmp_path / "tiny.gguf", "qwen2", model, "Q8_0")
    assert GgufFile(path).kinds["Q8_0"] > 0.98
    (out := tmp_path / "out").mkdir()
    convert(GgufFile(path), out)
    weight = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    blocks = quantize(weight, GGMLQuantizationType.Q8_0).reshape(-1, 2 + 32)
    held = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].copy().view(np.int8)
    with safe_open(out / "model.safetensors", "pt") as stored:
        found = stored.get_tensor("model.layers.1.mlp.up_proj.weight")
    assert torch.equal(found, torch.from_numpy(held).reshape(found.shape).bfloat16())


def test_the_tokenizer_reads_as_the_one_whose_vocabulary_the_file_has(files, tmp_path):
    path, _ = files["qwen2"]
    convert(GgufFile(path), tmp_path)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(path.parent / "words")
    text = tiny.paragraphs(3)[2] + "<|endoftext|> é 12"
    assert ours(text).input_ids == theirs(text).input_ids and ours.eos_token == "<|endoftext|>"


@pytest.mark.parametrize(("architecture", "begins"), [("gemma3", True), ("qwen2", False)])
def test_a_text_begins_as_the_file_says(architecture, begins, files, tmp_path):
    """A model whose texts all began with a token predicts badly without it, and no error says so."""
    convert(GgufFile(files[architecture][0]), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert bos(tokenizer) == ([tokenizer.bos_token_id] if begins else [])


def test_a_file_of_ones_own_becomes_a_folder_that_says_what_its_weights_are(files, tmp_path, capsys):
    path, _ = files["qwen2"]
    cli.main(["weights", str(path), "--out", str(tmp_path / "mine")])
    origin = read_origin(tmp_path / "mine")
    assert origin.disclosure == "The weights of tiny here are those of qwen2.gguf, F32 (100 %) by number, in bfloat16."
    assert origin.licence == "not told by the file" and origin.gguf is None
    assert f"{tmp_path / 'mine'}: {origin.told}\n" == capsys.readouterr().out
    text = tiny.write_text(tmp_path / "text.txt")
    words = ["--text", text, "--codec", "kivi", "--bits", "4", "--context", "32", "--eval", "8", "--windows", "2"]
    cli.main(["measure", str(tmp_path / "mine"), *map(str, words), "--json", str(tmp_path / "found.json")])
    assert origin.told in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["disclosure"] == origin.told


BROKEN = {
    "cut short": ("model.broken-gguf", lambda whole: whole[: len(whole) // 2]),
    "cut in its header": ("model.broken-gguf", lambda whole: whole[:1000]),
    "cut by one value": ("model.broken-gguf", lambda whole: whole[:-4]),
    "empty": ("model.broken-gguf", lambda whole: b""),
    "another file": ("model.broken-gguf", lambda whole: b"PK" + whole[2:]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_leaves_nothing(what, files, tmp_path):
    code, broken = BROKEN[what]
    path = tmp_path / "broken.gguf"
    path.write_bytes(broken(files["llama"][0].read_bytes()))
    with refused(ModelError, code, path):
        make_own(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("code", "named", "architecture", "settings"),
    [
        ("model.gguf-setting", "llama.rope.scaling.type", "llama", {"rope.scaling.type": "yarn"}),
        ("model.gguf-setting", "qwen2.attention.sliding_window", "qwen2", {"attention.sliding_window": 16}),
        ("model.gguf-setting", "rope.freq_base", "qwen2", {"rope.freq_base": None}),
        ("model.gguf-setting", "rope.dimension_count", "llama", {"rope.dimension_count": 16}),
        ("model.other-tensors", "blk.2.", "qwen2", {"block_count": 2}),
        ("model.other-tensors", "[128, 224]", "qwen2", {"feed_forward_length": 224}),
    ],
)
def test_what_would_make_another_model_is_refused(code, named, architecture, settings, tmp_path):
    path = write(tmp_path / "tiny.gguf", architecture, **settings)
    before = sorted(tmp_path.iterdir())
    with refused(ModelError, code, named):
        make_own(path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_an_unknown_type_is_refused_with_those_that_there_are(files, tmp_path):
    """A tensor's type stands after its name, the count of its dimensions and these: it is made 77, and one not read."""
    whole, path = files["qwen2"][0].read_bytes(), tmp_path / "other.gguf"
    name = b"output_norm.weight"
    at = whole.index(name) + len(name) + 4 + 8
    for kind, told in ((77, "77"), (9, "Q8_1")):
        path.write_bytes(whole[:at] + kind.to_bytes(4, "little") + whole[at + 4 :])
        with refused(ModelError, "model.gguf-type", told, "Q4_K"):
            make_own(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_a_tokenizer_of_another_kind_is_refused(files, tmp_path):
    whole, path = files["llama"][0].read_bytes(), tmp_path / "other.gguf"
    path.write_bytes(whole.replace(b"gpt2", b"bert"))
    with refused(ModelError, "model.gguf-setting", "'bert'", "'gpt2'"):
        make_own(path, tmp_path / "out")


def test_another_architecture_is_refused_with_the_nearest(files, tmp_path):
    whole, path = files["qwen2"][0].read_bytes(), tmp_path / "other.gguf"
    path.write_bytes(whole.replace(b"qwen2", b"qwen9"))
    with refused(ModelError, "model.architecture", "'qwen9'", "gemma3", "did you mean 'qwen"):
        make_own(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.gguf"], "no file or folder nowhere.gguf"),
        (["{file}"], "--out DIR"),
        (["{folder}", "--out", "x"], "leave --out out"),
        (["{folder}"], ORIGIN),
        (["{file}", "--out", "{folder}"], "is there already"),
    ],
)
def test_a_wrong_command_is_one_line(words, said, files, tmp_path, capsys):
    (tmp_path / "something").touch()
    given = [word.format(file=files["qwen2"][0], folder=tmp_path) for word in words]
    with pytest.raises(SystemExit) as stop:
        cli.main(["weights", *given])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and said in err and err.count("\n") == 1

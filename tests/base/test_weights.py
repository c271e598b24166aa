"""The hash of a model covers exactly what every engine opens, and no code of a model runs."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.base.errors import ModelError
from kvlab.base.model import load_tokenizer, resolve
from kvlab.base.params import Model
from kvlab.base.records import file_hash
from kvlab.base.weights import INDEX, WHOLE, weight_files
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.engines.hf import HFEngine

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    """A copy of the model, in one file."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


@pytest.fixture
def sharded(folder) -> Path:
    """The same in two shards and their index."""
    tensors = load_file(folder / WHOLE)
    names = sorted(tensors)
    parts = {SHARDS[0]: names[::2], SHARDS[1]: names[1::2]}
    for shard, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / shard, metadata={"format": "pt"})
    (folder / WHOLE).unlink()
    write_index(folder, {name: shard for shard, held in parts.items() for name in held})
    return folder


def write_index(folder: Path, weight_map: dict) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def resolved(folder: Path):
    return resolve(Model(path=str(folder), n_layers=3))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        resolved(folder)
    assert "\n" not in str(caught.value)


def test_the_hash_of_an_ordinary_folder_is_that_of_config_and_weights(folder):
    assert resolved(folder).model_hash == file_hash(folder / "config.json", folder / WHOLE)


def test_the_hash_of_shards_is_that_of_config_and_shards_in_order(sharded):
    assert resolved(sharded).model_hash == file_hash(sharded / "config.json", *(sharded / name for name in SHARDS))


def test_an_engine_loads_what_was_hashed(sharded, tiny_model):
    """The shards give the logits of the whole, and the metrics find their tensors."""
    ids = list(range(20, 40))
    whole, parts = (HFEngine(resolved(path), "float32", "eager", 32) for path in (tiny_model, sharded))
    assert torch.equal(whole.score(ids, 10), parts.score(ids, 10))
    assert ErrorMetrics(resolved(sharded), 16).v(2).shape == (2, 32, 32)


def test_shards_that_the_index_does_not_name_are_in_no_hash(sharded):
    before = resolved(sharded).model_hash
    save_file({"decoy": torch.ones(1)}, sharded / "decoy.safetensors")
    assert resolved(sharded).model_hash == before and len(weight_files(sharded)) == 2


def test_an_index_beside_the_one_file_that_it_names(folder):
    write_index(folder, {"lm_head.weight": WHOLE})
    assert resolved(folder).model_hash == file_hash(folder / "config.json", folder / WHOLE)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../outside.safetensors", "'../outside.safetensors'; allowed: files that lie in this folder itself"),
        ("sub/inside.safetensors", "'sub/inside.safetensors'; allowed: files that lie in this folder itself"),
        ("/etc/x.safetensors", "allowed: files that lie in this folder itself"),
        ("absent.safetensors", "names 'absent.safetensors', which is not there"),
        ("pytorch_model.bin", r"names 'pytorch_model.bin'; allowed: \*.safetensors"),
        ("linked.safetensors", "names 'linked.safetensors', a link that leaves the folder"),
        (7, "is no index of weights"),
    ],
)
def test_an_index_names_files_of_its_folder(sharded, name, words):
    weight = (sharded / SHARDS[0]).read_bytes()
    (sharded / "sub").mkdir()
    for place in ("../outside.safetensors", "sub/inside.safetensors", "pytorch_model.bin"):
        (sharded / place).write_bytes(weight)
    (sharded / "linked.safetensors").symlink_to(sharded.parent / "outside.safetensors")
    write_index(sharded, {"a": SHARDS[0], "b": name})
    refused(sharded, words)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_what_is_no_index_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, "is no index of weights")


def test_the_links_of_the_hubs_cache_go_on_working(sharded, tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in sharded.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    assert resolved(snapshot).model_hash == resolved(sharded).model_hash
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to(sharded / SHARDS[0])
    refused(snapshot, "a link that leaves the folder")


def test_a_folder_that_is_a_link_itself_goes_on_working(sharded, tmp_path):
    (tmp_path / "link").symlink_to(sharded)
    assert resolved(tmp_path / "link").model_hash == resolved(sharded).model_hash


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_a_pickle_alone_is_refused_by_name(folder, name):
    (folder / WHOLE).rename(folder / name)
    refused(folder, f"no .* weights, and {name} is a pickle")


def test_a_pickle_beside_decoys_is_refused(folder):
    (folder / WHOLE).rename(folder / "decoy.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    refused(folder, "holds decoy.safetensors, but neither model.safetensors nor model.safetensors.index.json")


def test_a_pickle_beside_the_weights_is_never_opened(folder):
    before = resolved(folder).model_hash
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert resolved(folder).model_hash == before
    HFEngine(resolved(folder), "float32", "eager", 32)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other.safetensors", "holds other.safetensors beside model.safetensors"),
        ("consolidated.safetensors", "holds consolidated.safetensors, which vLLM opens and transformers does not"),
        ("adapter_config.json", "by which an adapter is loaded"),
    ],
)
def test_what_only_one_engine_would_load_is_refused(folder, name, words):
    shutil.copy(folder / WHOLE, folder / name)
    refused(folder, words)


def test_a_whole_file_beside_an_index_of_others_is_refused(sharded):
    save_file({"decoy": torch.ones(1)}, sharded / WHOLE)
    refused(sharded, "transformers loads, beside model.safetensors.index.json, which names other files")


def test_code_of_a_model_never_runs_and_nobody_is_asked(folder, monkeypatch):
    marker = folder / "it-ran"
    for file in ("configuration_x", "modeling_x", "tokenization_x"):
        (folder / f"{file}.py").write_text(f"open({str(marker)!r}, 'w')\nclass X: pass\n")
    info = resolved(folder)
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    edit(folder / "config.json", auto_map=code, model_type="x")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", None]}, tokenizer_class="X")
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a person was asked"))
    refused(folder, "model_type of .* is 'x'; .*; code that a model brings .* is never run")
    for load in (load_tokenizer, lambda info: HFEngine(info, "float32", "eager", 32)):
        with pytest.raises(ModelError) as caught:
            load(info)
        assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_a_known_model_with_code_of_its_own_runs_without_it(folder):
    marker = folder / "it-ran"
    (folder / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w')\nclass X: pass\n")
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    HFEngine(resolved(folder), "float32", "eager", 32)
    assert not marker.exists()


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))

"""The hash of a model covers exactly what every engine opens, and no code of a model runs."""

from __future__ import annotations

import builtins
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvlab.calibration.metrics import ErrorMetrics
from kvlab.core import tensors
from kvlab.core.errors import ModelError
from kvlab.core.model import load_tokenizer, resolve
from kvlab.core.params import Model
from kvlab.core.records import file_hash
from kvlab.core.tensors import model_tensors
from kvlab.core.weights import INDEX, WHOLE, weight_files
from kvlab.engines.hf.engine import HFEngine
from kvlab.witness.plain import PlainModel
from refusals import refused, refused_in_one_line
from tiny import edit

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


def refuses(folder: Path, code: str, *data: object) -> None:
    with refused_in_one_line(ModelError, code, *data):
        resolved(folder)


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
    ("name", "code"),
    [
        ("../outside.safetensors", "model.file-elsewhere"),
        ("sub/inside.safetensors", "model.file-elsewhere"),
        ("/etc/x.safetensors", "model.file-elsewhere"),
        ("absent.safetensors", "model.file-missing"),
        ("pytorch_model.bin", "model.file-kind"),
        ("linked.safetensors", "model.file-linked"),
    ],
)
def test_an_index_names_files_of_its_folder(sharded, name, code):
    weight = (sharded / SHARDS[0]).read_bytes()
    (sharded / "sub").mkdir()
    for place in ("../outside.safetensors", "sub/inside.safetensors", "pytorch_model.bin"):
        (sharded / place).write_bytes(weight)
    (sharded / "linked.safetensors").symlink_to(sharded.parent / "outside.safetensors")
    write_index(sharded, {"a": SHARDS[0], "b": name})
    refuses(sharded, code, INDEX, repr(name))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 7}}', "[" * 100_000]
)
def test_what_is_no_index_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    refuses(sharded, "model.broken-index", sharded / INDEX)


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
    refuses(snapshot, "model.file-linked", repr(SHARDS[0]))


def test_a_folder_that_is_a_link_itself_goes_on_working(sharded, tmp_path):
    (tmp_path / "link").symlink_to(sharded)
    assert resolved(tmp_path / "link").model_hash == resolved(sharded).model_hash


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_a_pickle_alone_is_refused_by_name(folder, name):
    (folder / WHOLE).rename(folder / name)
    refuses(folder, "model.no-weights", f"{name} is a pickle")


def test_a_pickle_beside_decoys_is_refused(folder):
    (folder / WHOLE).rename(folder / "decoy.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    refuses(folder, "model.no-index", "decoy.safetensors", WHOLE, INDEX)


def test_a_pickle_beside_the_weights_is_never_opened(folder):
    before = resolved(folder).model_hash
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert resolved(folder).model_hash == before
    HFEngine(resolved(folder), "float32", "eager", 32)


@pytest.mark.parametrize(
    ("name", "code", "data"),
    [
        ("other.safetensors", "model.other-weights", (f"beside {WHOLE}",)),
        ("consolidated.safetensors", "model.other-weights", ()),
        ("adapter_config.json", "model.adapter", ()),
    ],
)
def test_what_only_one_engine_would_load_is_refused(folder, name, code, data):
    shutil.copy(folder / WHOLE, folder / name)
    refuses(folder, code, name, *data)


def test_a_whole_file_beside_an_index_of_others_is_refused(sharded):
    save_file({"decoy": torch.ones(1)}, sharded / WHOLE)
    refuses(sharded, "model.other-weights", f"{WHOLE}, which transformers loads", INDEX)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: x.clone() for name, x in tensors.items()}, folder / WHOLE, metadata={"format": "pt"})


def spoil(folder: Path, change) -> None:
    """Write the tensors that `change` makes of the folder's."""
    rewrite(folder, change(load_file(folder / WHOLE)))


def without(part: str):
    return lambda tensors: {name: x for name, x in tensors.items() if part not in name}


def fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections over a scale, which stands beside them."""
    found = {}
    for name, x in tensors.items():
        if name.endswith("proj.weight"):
            scale = x.float().abs().amax() / 448
            found |= {name: (x.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.reshape(1)}
        else:
            found[name] = x
    return found


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections as GPTQ names them."""
    found = {}
    for name, x in tensors.items():
        stem = name.removesuffix("weight")
        if name.endswith("proj.weight"):
            found |= {f"{stem}qweight": torch.zeros(4, 4, dtype=torch.int32), f"{stem}scales": torch.ones(4)}
        else:
            found[name] = x
    return found


K0 = "model.layers.0.self_attn.k_proj"
SPOILT = {
    "a bias": (without(f"{K0}.bias"), "model.tensor-missing", (f"{K0}.bias [64]",)),
    "a matrix": (without(f"{K0}.weight"), "model.tensor-missing", (f"{K0}.weight [64, 128]",)),
    "a norm": (without("model.norm"), "model.tensor-missing", ("model.norm.weight [128]",)),
    "a layer": (without("layers.2."), "model.tensor-missing", ("model.layers.2.", "(11 more")),
    "the embedding": (without("embed_tokens"), "model.tensor-missing", ("model.embed_tokens.weight",)),
    "a shape": (
        lambda t: t | {f"{K0}.weight": torch.zeros(8, 128)},
        "model.tensor-shape",
        (f"{K0}.weight", "[8, 128]", "[64, 128]"),
    ),
    "a transposed matrix": (
        lambda t: t | {f"{K0}.weight": t[f"{K0}.weight"].T.contiguous()},
        "model.tensor-shape",
        (f"{K0}.weight", "[128, 64]"),
    ),
    "a bias too many": (
        lambda t: t | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(128)},
        "model.tensor-unknown",
        ("o_proj.bias",),
    ),
    "a layer too many": (
        lambda t: t | {"model.layers.3.mlp.up_proj.weight": torch.zeros(192, 128)},
        "model.tensor-unknown",
        ("layers.3.mlp",),
    ),
    "a name of another kind": (
        lambda t: {n.removeprefix("model."): x for n, x in t.items()},
        "model.tensor-missing",
        ("embed_tokens",),
    ),
    "an adapter": (
        lambda t: t | {"base_model.model.lora_A.weight": torch.zeros(2, 2)},
        "model.tensor-unknown",
        ("lora_A.weight",),
    ),
    "whole numbers": (
        lambda t: t | {f"{K0}.bias": torch.zeros(64, dtype=torch.int8)},
        "model.tensor-type",
        (f"{K0}.bias is I8", "allowed: BF16"),
    ),
    "8 bits": (
        lambda t: t | {f"{K0}.bias": torch.zeros(64).to(torch.float8_e5m2)},
        "model.tensor-type",
        (f"{K0}.bias is F8_E5M2",),
    ),
    "8 bits and scales": (fp8, "model.quantised", ("_proj.weight is F8_E4M3", "_scale")),
    "scales alone": (
        lambda t: t | {f"{K0}.weight_scale": torch.ones(1)},
        "model.quantised",
        (f"({K0}.weight_scale)",),
    ),
    "packed": (packed, "model.quantised", ("qweight is I32",)),
    "another head": (
        lambda t: t | {"lm_head.weight": torch.zeros(320, 128)},
        "model.other-head",
        ("lm_head.weight", "model.embed_tokens"),
    ),
    "nearly its head": (
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].index_fill(0, torch.tensor(7), 0)},
        "model.other-head",
        ("lm_head.weight", "model.embed_tokens"),
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_weights_that_are_not_the_models_are_refused_by_name(folder, case):
    """transformers fills in what is missing and leaves out what is too much, with a warning at most."""
    change, code, data = SPOILT[case]
    spoil(folder, change)
    refuses(folder, code, *data)
    with refused(ModelError, code, *data):
        PlainModel(folder)


HARMLESS = {
    "a tied head that is there": lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]},
    "frequencies of an old file": lambda t: (
        t | {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(16) for n in range(3)}
    ),
    "other whole types": lambda t: {
        name: x.to(torch.float64 if "norm" in name else torch.float16) for name, x in t.items()
    },
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_changes_nothing_goes_on_working(folder, case):
    before = HFEngine(resolved(folder), "float32", "eager", 32).score(list(range(20, 40)), 10)
    spoil(folder, HARMLESS[case])
    after = HFEngine(resolved(folder), "float32", "eager", 32).score(list(range(20, 40)), 10)
    assert torch.allclose(before, after, atol=2e-2 if "types" in case else 0)


def test_a_head_of_its_own_must_be_there(folder):
    edit(folder / "config.json", tie_word_embeddings=False)
    refuses(folder, "model.tensor-missing", "lm_head.weight [320, 128]")
    spoil(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] * 2})
    ids = list(range(20, 40))
    plain = PlainModel(folder).forward(ids, 10).logits
    torch.testing.assert_close(plain, HFEngine(resolved(folder), "float32", "eager", 32).score(ids, 10))


def test_a_shard_holds_what_the_index_says(sharded):
    listed = json.loads((sharded / INDEX).read_text())["weight_map"]
    name = next(name for name, shard in listed.items() if shard == SHARDS[1])
    write_index(sharded, listed | {name: SHARDS[0]})
    refuses(sharded, "model.tensor-elsewhere", f"{name} lies in {SHARDS[1]}", f"{INDEX} says {SHARDS[0]}")
    write_index(sharded, listed | {"model.extra.weight": SHARDS[0]})
    refuses(sharded, "model.tensor-missing", "model.extra.weight", INDEX, SHARDS[0])
    write_index(sharded, listed)
    tensors = load_file(sharded / SHARDS[1])
    save_file({n: x for n, x in tensors.items() if n != name}, sharded / SHARDS[1], metadata={"format": "pt"})
    refuses(sharded, "model.tensor-missing", name, INDEX, SHARDS[1])
    both = load_file(sharded / SHARDS[0])
    save_file(tensors | dict([next(iter(both.items()))]), sharded / SHARDS[1], metadata={"format": "pt"})
    refuses(sharded, "model.tensor-twice", *SHARDS)


@pytest.mark.parametrize("size", [4, 100, -1])
def test_a_file_that_is_cut_short(folder, size):
    (folder / WHOLE).write_bytes((folder / WHOLE).read_bytes()[:size])
    refuses(folder, "model.broken-weights", folder / WHOLE)


METHODS = ("gptq", "awq", "bitsandbytes", "fp8", "hqq", "quanto", "mxfp4", "torchao", "modelopt", "compressed-tensors")


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_that_says_it_is_quantised(folder, method):
    edit(folder / "config.json", quantization_config={"quant_method": method})
    refuses(folder, "model.quantised", "config.json", repr(method))
    assert resolve(Model(path=str(folder), n_layers=3), loads=False).n_layers == 3  # vLLM may serve it, with a codec


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_a_file_that_says_that_weights_are_quantised(folder, name):
    (folder / name).write_text("{}")
    refuses(folder, "model.quantised", f"({name}", f"remove {name}")
    (folder / name).unlink()
    edit(folder / "config.json", quantization_config=None)
    resolved(folder)


def test_the_line_that_makes_weights_whole_does(folder):
    """Of the methods, the one whose package comes with vLLM."""
    pytest.importorskip("compressed_tensors")
    before = resolved(folder)
    spoil(folder, fp8)
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    edit(folder / "config.json", quantization_config=said | {"config_groups": groups, "ignore": ["lm_head"]})
    refuses(folder, "model.quantised", "'compressed-tensors'")
    new = folder.parent / "whole"
    names = {name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "CompressedTensorsConfig")}
    exec(tensors.DEQUANTISED["compressed-tensors"], names | {"DIR": folder, "NEW": new})
    assert resolved(new).model_hash != before.model_hash
    found, due = (load_file(path / WHOLE)[f"{K0}.weight"].float() for path in (new, folder))
    scale = load_file(folder / WHOLE)[f"{K0}.weight_scale"]
    torch.testing.assert_close(found, due * scale, rtol=1e-2, atol=1e-4)


def test_what_transformers_fills_in_is_refused_by_the_engine_too(folder):
    """A second look, for what the first could not know: at what the loader itself says that it did."""
    spoil(folder, without(f"{K0}.bias"))
    info = resolve(Model(path=str(folder), n_layers=3), loads=False)
    with refused(ModelError, "model.other-tensors", f"missing_keys: {K0}.bias"):
        HFEngine(info, "float32", "eager", 32)
    spoil(folder, lambda t: t | {f"{K0}.bias": torch.zeros(64), "model.more": torch.zeros(1)})
    with refused(ModelError, "model.other-tensors", "unexpected_keys: model.more"):
        HFEngine(info, "float32", "eager", 32)
    spoil(folder, lambda t: without("more")(t) | {f"{K0}.bias": torch.zeros(63)})
    with refused(ModelError, "model.not-loaded", folder):
        HFEngine(info, "float32", "eager", 32)


@pytest.mark.parametrize(
    "changes",
    [
        *({"_attn_implementation": named} for named in ("eager", "flash_attention_2", "fancy", 5)),
        {"attn_implementation": "eager"},
        {"output_attentions": True},
        {"return_dict": False},
    ],
)
def test_the_attention_that_is_asked_for_runs_whatever_the_config_names(folder, changes):
    edit(folder / "config.json", **changes)
    engine = HFEngine(resolved(folder), "float32", "sdpa", 32)
    with engine.reading() as seen:
        engine.score(list(range(20, 40)), 10)
    assert seen.attention == "sdpa_attention_forward"


@pytest.mark.parametrize("change", [{"use_cache": "no"}, {"dtype": "fancy"}, {"id2label": 5}, {"eos_token_id": "x"}])
def test_what_transformers_alone_cannot_read_is_a_line(folder, change):
    edit(folder / "config.json", **change)
    with refused_in_one_line(ModelError, "model.not-loaded", folder):
        HFEngine(resolved(folder), "float32", "eager", 32)


def test_only_headers_are_read(folder, monkeypatch):
    """A model of many gigabytes is looked at in no time: nothing is taken out of its files."""

    @contextmanager
    def headers(*given):
        with safe_open(*given) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda name: shape_of(file.get_slice(name)))

    def shape_of(part):
        return SimpleNamespace(get_shape=part.get_shape, get_dtype=part.get_dtype)

    monkeypatch.setattr("kvlab.core.tensors.safe_open", headers)
    decoder, held = model_tensors(folder, json.loads((folder / "config.json").read_text()))
    assert {name: one.shape for name, one in held.items()} == decoder.tensors()


def test_code_of_a_model_never_runs_and_nobody_is_asked(folder, monkeypatch):
    marker = folder / "it-ran"
    for file in ("configuration_x", "modeling_x", "tokenization_x"):
        (folder / f"{file}.py").write_text(f"open({str(marker)!r}, 'w')\nclass X: pass\n")
    info = resolved(folder)
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    edit(folder / "config.json", auto_map=code, model_type="x")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", None]}, tokenizer_class="X")
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a person was asked"))
    refuses(folder, "model.type", "is 'x'", "auto_map")
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

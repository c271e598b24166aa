"""Models that cannot be measured are refused before anything runs."""

from __future__ import annotations

import json
import shutil

import pytest

from kvlab.base.errors import CapabilityError, ModelError, UnknownName
from kvlab.base.model import layer_count, resolve
from kvlab.base.params import Model, ModelEntry
from kvlab.engines.capability import check, check_protocol

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def model(path, n_layers=3) -> Model:
    return Model(path=str(path), revision=None, n_layers=n_layers)


def edited(folder, tmp_path, **changes):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_the_shape_is_read_from_the_config(tiny_model):
    info = resolve(model(tiny_model))
    assert (info.n_layers, info.n_heads, info.n_kv_heads, info.head_dim) == (3, 4, 2, 32)
    assert info.values_per_token == 2 * 3 * 2 * 32


def test_a_missing_folder_names_its_nearest_neighbour(tiny_model):
    with pytest.raises(ModelError, match=f"does not exist.*{tiny_model.name}"):
        resolve(model(str(tiny_model) + "s"))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(model(tmp_path))


def test_an_architecture_that_the_hooks_do_not_know(tiny_model, tmp_path):
    with pytest.raises(ModelError, match=r"'Qwen2MoeForCausalLM' is not supported.*Qwen2ForCausalLM"):
        resolve(model(edited(tiny_model, tmp_path, architectures=["Qwen2MoeForCausalLM"])))


def test_sliding_windows_are_refused(tiny_model, tmp_path):
    with pytest.raises(ModelError, match="sliding"):
        resolve(model(edited(tiny_model, tmp_path, layer_types=["sliding_attention"] * 3)))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (MISTRAL, True),
        (MISTRAL | {"sliding_window": 4096}, True),
        (MISTRAL | {"sliding_window": None}, False),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": 4096, "use_sliding_window": True}, True),
    ],
)
def test_a_window_counts_where_the_model_uses_it(tiny_model, tmp_path, changes, refused):
    copy = edited(tiny_model, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in ("sliding_window", "use_sliding_window", "layer_types")}
    (copy / "config.json").write_text(json.dumps(config | changes))
    if refused:
        with pytest.raises(ModelError, match="sliding"):
            resolve(model(copy))
    else:
        resolve(model(copy))


def test_a_hub_id_must_be_pinned():
    with pytest.raises(ModelError, match=r"pin it with `revision`"):
        resolve(model("owner/name"))


def test_a_protocol_outside_the_table():
    with pytest.raises(UnknownName, match="'snapshot'"):
        check_protocol("vllm", "snapshots")


def test_another_number_of_layers(tiny_model):
    with pytest.raises(ModelError, match=r"has 3 layers, and had 4 when this was planned"):
        resolve(model(tiny_model, n_layers=4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, "model_type of .* is 'gemma2'; allowed for Qwen2ForCausalLM: 'qwen2'"),
        ({"model_type": None}, "model_type of .* is None"),
        ({"architectures": "Qwen2ForCausalLM"}, "'none' is not supported"),
        ({"architectures": [["Qwen2ForCausalLM"]]}, "is not supported"),
        (
            {"transformers_weights": "sub/other.safetensors"},
            "has transformers_weights, a file that vLLM would not load",
        ),
        ({"vocab_size": "many"}, "vocab_size in config.json of .* is 'many'; allowed: a whole number from 1"),
        ({"hidden_size": None, "head_dim": None}, "hidden_size in config.json of .* is None"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json of .* is 0"),
        ({"num_attention_heads": True}, "num_attention_heads in config.json of .* is True"),
    ],
)
def test_a_config_that_engines_would_read_otherwise_is_refused_in_one_line(tiny_model, tmp_path, changes, words):
    with pytest.raises(ModelError, match=words) as caught:
        resolve(model(edited(tiny_model, tmp_path, **changes)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(tiny_model, tmp_path, text):
    copy = edited(tiny_model, tmp_path)
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="is no configuration of a model"):
        resolve(model(copy))
    with pytest.raises(ModelError, match="is no configuration of a model"):
        layer_count(ModelEntry(path=str(copy)))


def test_no_more_layers_than_any_model_has(tiny_model, tmp_path):
    with pytest.raises(ModelError, match="names 1000000000 layers; allowed: at most 1024"):
        layer_count(ModelEntry(path=str(edited(tiny_model, tmp_path, num_hidden_layers=10**9))))


def test_the_hash_follows_the_weights(tiny_model, tmp_path):
    copy = edited(tiny_model, tmp_path)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert resolve(model(copy)).model_hash != resolve(model(tiny_model)).model_hash


def test_a_head_size_that_vllm_gets_wrong(tiny_model, tmp_path):
    info = resolve(model(edited(tiny_model, tmp_path, head_dim=48)))
    with pytest.raises(CapabilityError, match=r"head size 48; allowed: 32, 64.*nearest: 32"):
        check("vllm", "float32", "default", info)
    check("hf", "float32", "eager", info)
    check("vllm", "float32", "default", info, on_cpu=False)


@pytest.mark.parametrize(
    ("engine", "dtype", "attention"),
    [("hg", "float32", "eager"), ("hf", "float16", "eager"), ("vllm", "bfloat16", "sdpa")],
)
def test_what_an_engine_cannot_do_is_refused_by_name(tiny_model, engine, dtype, attention):
    with pytest.raises(UnknownName, match="allowed"):
        check(engine, dtype, attention, resolve(model(tiny_model)))

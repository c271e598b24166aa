"""Models that cannot be measured are refused before anything runs."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from kvlab.core.decoder import ROPES, TRAINED, Decoder, rope_of
from kvlab.core.errors import CapabilityError, ModelError, UnknownName
from kvlab.core.model import layer_count, load_tokenizer, resolve, resolve_folder
from kvlab.core.params import Model, ModelEntry
from kvlab.engines.capability import check, check_protocol
from refusals import refused, refused_in_one_line

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def model(path, n_layers=3) -> Model:
    return Model(path=str(path), revision=None, n_layers=n_layers)


def edited(folder, tmp_path, **changes):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tiny.edit(copy / "config.json", **changes)
    return copy


def test_the_shape_is_read_from_the_config(tiny_model):
    info = resolve(model(tiny_model))
    assert (info.n_layers, info.n_heads, info.n_kv_heads, info.head_dim) == (3, 4, 2, 32)
    assert info.values_per_token == 2 * 3 * 2 * 32


def test_a_missing_folder_names_its_nearest_neighbour(tiny_model):
    with refused(ModelError, "model.no-folder", repr(str(tiny_model))):
        resolve(model(str(tiny_model) + "s"))


def test_a_folder_without_a_model(tmp_path):
    with refused(ModelError, "model.no-config", tmp_path, "no config.json"):
        resolve(model(tmp_path))


def test_an_architecture_that_the_hooks_do_not_know(tiny_model, tmp_path):
    with refused(ModelError, "model.architecture", "'Qwen2MoeForCausalLM'", "did you mean Qwen2ForCausalLM"):
        resolve(model(edited(tiny_model, tmp_path, architectures=["Qwen2MoeForCausalLM"])))


QWEN = {"layer_types": None, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}
GEMMA = {"sliding_window": 40, "layer_types": None}


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("mistral", {}, [None] * 3),
        ("mistral", {"sliding_window": 40}, [40] * 3),
        ("mistral", {"sliding_window": ...}, [4096] * 3),
        ("mistral", {"sliding_window": 40, "layer_types": ["sliding_attention"] * 3}, [40] * 3),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": False}, [None] * 3),
        ("qwen2", QWEN, [None, None, 40]),
        ("qwen3", QWEN | {"max_window_layers": ...}, [None] * 3),
        ("qwen2", QWEN | {"layer_types": ["sliding_attention"] + ["full_attention"] * 2}, [40, None, None]),
        ("gemma3", GEMMA, [40] * 3),
        ("gemma3", GEMMA | {"sliding_window_pattern": 2}, [40, None, 40]),
        ("gemma3", {}, [24, 24, None]),
    ],
)
def test_the_windows_are_those_of_transformers(tmp_path, kind, changes, windows):
    folder = tiny.write_model(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    assert list(resolve_folder(folder).windows) == windows
    found = AutoModelForCausalLM.from_pretrained(folder)
    whole = "sliding_window" if kind == "mistral" else None  # has no kinds of layers, and one window for all
    theirs = [getattr(found.config, whole)] * 3 if whole else [x.self_attn.sliding_window for x in found.model.layers]
    assert theirs == windows


@pytest.mark.parametrize(
    ("kind", "changes", "code", "words"),
    [
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "model.config-misfit", ["use_sliding_window"]),
        ("qwen2", QWEN | {"layer_types": ["sliding_attention"] * 2}, "model.config-misfit", ["3 layers"]),
        ("qwen2", QWEN | {"max_window_layers": -1}, "model.config-value", ["max_window_layers", "-1"]),
        ("mistral", {"sliding_window": 0}, "model.config-value", ["sliding_window", "0"]),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, "model.config-misfit", ["'full_attention'"]),
        ("gemma3", {"sliding_window": None}, "model.config-value", ["sliding_window"]),
        ("llama", {"sliding_window": 64}, "model.config-misfit", ["sliding_window", "64", "vLLM"]),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "model.config-misfit", ["rope_parameters"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "model.soft-cap", ["attn_logit_softcapping"]),
        ("gemma3", {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "model.soft-cap", ["Gemma2"]),
        ("gemma3", {"use_bidirectional_attention": True}, "model.both-ways", []),
        ("llama", {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "model.attention-sinks", []),
        (
            "llama",
            {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 64},
            "model.latent-attention",
            ["MLA"],
        ),
    ],
)
def test_attention_that_is_not_held_is_refused_in_a_line(tmp_path, kind, changes, code, words):
    folder = tiny.write_model(tmp_path / "model", kind)
    with refused_in_one_line(ModelError, code, *words):
        resolve_folder(edited(folder, tmp_path, **changes))


def test_gemma_has_a_rotary_embedding_for_each_kind_of_layer(tmp_path):
    folder = tiny.write_model(tmp_path / "model", "gemma3")
    said = json.loads((folder / "config.json").read_text())
    due = [1e4, 1e4, 1e6]
    assert [layer.rope["rope_theta"] for layer in Decoder.read(said, folder).layers] == due
    older = {name: value for name, value in said.items() if name != "rope_parameters"}
    older |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert rope_of(older) == rope_of(said) == rope_of(AutoModelForCausalLM.from_pretrained(folder).config.to_dict())


def test_a_hub_id_must_be_pinned():
    with refused(ModelError, "model.unpinned", "'owner/name'", "`revision`"):
        resolve(model("owner/name"))


def test_a_protocol_outside_the_table():
    with refused(UnknownName, None, "'snapshots'", "'snapshot'"):
        check_protocol("vllm", "snapshots")


def test_another_number_of_layers(tiny_model):
    with refused(ModelError, "model.other-layers", "3 layers", "had 4"):
        resolve(model(tiny_model, n_layers=4))


@pytest.mark.parametrize(
    ("changes", "code", "data"),
    [
        ({"model_type": "gemma2"}, "model.type", ("is 'gemma2'", "Qwen2ForCausalLM: 'qwen2'")),
        ({"model_type": None}, "model.type", ("is None",)),
        ({"architectures": "Qwen2ForCausalLM"}, "model.architecture", ("'none'",)),
        ({"architectures": [["Qwen2ForCausalLM"]]}, "model.architecture", ("['Qwen2ForCausalLM']",)),
        ({"transformers_weights": "sub/other.safetensors"}, "model.other-weights", ("transformers_weights",)),
        ({"vocab_size": "many"}, "model.config-value", ("vocab_size", "is 'many'", "a whole number from 1")),
        ({"hidden_size": None, "head_dim": None}, "model.config-value", ("hidden_size", "is None")),
        ({"num_attention_heads": 0}, "model.config-value", ("num_attention_heads", "is 0")),
        ({"num_attention_heads": True}, "model.config-value", ("num_attention_heads", "is True")),
    ],
)
def test_a_config_that_engines_would_read_otherwise_is_refused_in_one_line(tiny_model, tmp_path, changes, code, data):
    with refused_in_one_line(ModelError, code, *data):
        resolve(model(edited(tiny_model, tmp_path, **changes)))


LINEAR = {"rope_type": "linear", "factor": 2.0}
VALUE, MISFIT, MISSING = "model.config-value", "model.config-misfit", "model.config-missing"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "code", "data"),
    [
        ({"head_dim": None}, "model.config-null", ("head_dim",)),
        ({"head_dim": 0}, VALUE, ("head_dim", "is 0", "a whole number from 1")),
        ({"head_dim": 33}, MISFIT, ("head_dim", "is 33", "an even number")),
        ({"hidden_size": 130}, MISFIT, ("hidden_size", "is 130", "a multiple of the 4")),
        ({"num_key_value_heads": 3}, MISFIT, ("num_key_value_heads", "is 3", "the 4")),
        ({"num_hidden_layers": 2}, MISFIT, ("layer_types", "for each of 2")),
        ({"layer_types": 5}, MISFIT, ("layer_types", "is 5")),
        ({"layer_types": ["chunked_attention"] * 3}, MISFIT, ("layer_types", "'chunked_attention'")),
        ({"intermediate_size": None}, VALUE, ("intermediate_size", "is None")),
        ({"max_position_embeddings": 64.0}, VALUE, ("max_position_embeddings", "is 64.0")),
        ({"rms_norm_eps": -1e-6}, VALUE, ("rms_norm_eps", "is -1e-06", "a number above 0")),
        ({"rms_norm_eps": "1e-6"}, VALUE, ("rms_norm_eps", "is '1e-6'")),
        ({"rms_norm_eps": float("nan")}, VALUE, ("rms_norm_eps", "is nan")),
        ({"hidden_act": "fancy"}, VALUE, ("hidden_act", "is 'fancy'", "allowed: silu")),
        ({"tie_word_embeddings": "yes"}, VALUE, ("tie_word_embeddings", "is 'yes'", "allowed: true, false")),
        ({"tie_word_embeddings": None}, VALUE, ("tie_word_embeddings", "is None")),
        ({"attention_bias": 1}, VALUE, ("attention_bias", "is 1")),
        ({"pad_token_id": 320}, MISFIT, ("pad_token_id", "is 320", "below vocab_size")),
        ({"rope_theta": "1e4"}, VALUE, ("rope_theta", "is '1e4'")),
        ({"rope_parameters": {"rope_theta": None}}, VALUE, ("rope_theta", "is None")),
        ({"rope_scaling": [1, 2]}, VALUE, ("rope_scaling", "is [1, 2]", "a mapping")),
        ({"rope_parameters": "linear"}, VALUE, ("rope_parameters", "is 'linear'")),
        ({"rope_parameters": {"rope_type": "linaer"}}, VALUE, ("rope_type", "is 'linaer'", "did you mean 'linear'")),
        ({"rope_parameters": {"rope_type": ["linear"]}}, VALUE, ("rope_type", "is ['linear']")),
        ({"rope_parameters": {"rope_type": None}}, VALUE, ("rope_type", "is None")),
        ({"rope_parameters": {"rope_type": "linear"}}, MISSING, ("'linear'", "no factor")),
        ({"rope_parameters": LINEAR | {"factor": "2"}}, VALUE, ("factor", "is '2'", "a number above 0")),
        ({"rope_parameters": LINEAR | {"factor": 0}}, VALUE, ("factor", "is 0")),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": None}}, MISSING, ("no high_freq_factor",)),
        ({"rope_parameters": LLAMA3 | {TRAINED: None}}, MISSING, (TRAINED,)),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": None}},
            MISSING,
            ("'proportional'", "no factor"),
        ),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, MISFIT, ("low_freq_factor", "is 1.0")),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
            MISFIT,
            ("short_factor", "1 numbers"),
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": "x"}},
            VALUE,
            ("long_factor", "is 'x'"),
        ),
        ({"rope_parameters": {"full_attention": LINEAR}}, MISFIT, ("'full_attention'", "one for all")),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            MISFIT,
            ("partial_rotary_factor", "is 0.5", "allowed: 1"),
        ),
        (
            {"rope_parameters": LINEAR, "rope_scaling": LINEAR | {"factor": 4.0}},
            MISFIT,
            ("rope_parameters", "rope_scaling"),
        ),
    ],
)
def test_a_hand_edited_config_is_refused_by_the_value_that_is_wrong(tiny_model, tmp_path, changes, code, data):
    with refused_in_one_line(ModelError, code, *data):
        resolve_folder(edited(tiny_model, tmp_path, **changes))


@pytest.mark.parametrize("kind", sorted(tiny.CLASSES))
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True}, {"mlp_bias": True}])
def test_the_tensors_that_are_called_for_are_those_that_transformers_writes(kind, changes, tmp_path):
    folder = tiny.write_model(tmp_path / "copy", kind, **changes)
    decoder = Decoder.read(json.loads((folder / "config.json").read_text()), folder)
    assert decoder.tensors() == {name: tuple(x.shape) for name, x in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("changes", [{"head_dim": None}, {"rope_parameters": None}, {"layer_types": None}])
def test_what_transformers_takes_as_its_default_is_taken(tmp_path, changes):
    tiny.write_model(tmp_path / "llama", "llama")
    assert resolve_folder(edited(tmp_path / "llama", tmp_path, **changes)).head_dim == 32


def test_a_default_that_depends_on_the_architecture(tmp_path):
    """transformers makes a Qwen3 without head_dim one of 128, and a Mistral without KV heads one of 8."""
    config = json.loads((tiny.write_model(tmp_path / "q", "qwen3") / "config.json").read_text())
    silent = {name: value for name, value in config.items() if name not in ("head_dim", "num_key_value_heads")}
    assert Decoder.read(silent | {"num_attention_heads": 64}, tmp_path).head_dim == 128
    mistral = silent | MISTRAL | {"sliding_window": None, "num_attention_heads": 16}
    assert Decoder.read(mistral, tmp_path).n_kv_heads == 8
    assert set(ROPES) >= {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}


def without_tokens(folder):
    """A tokenizer of special tokens alone."""
    file = folder / "tokenizer.json"
    said = json.loads(file.read_text())
    said["model"] |= {"vocab": {}, "merges": []}
    file.write_text(json.dumps(said))


BROKEN = "model.broken-tokenizer"
TOKENIZERS = {
    "none": (lambda folder: (folder / "tokenizer.json").unlink(), "model.no-tokenizer"),
    "empty": (lambda folder: (folder / "tokenizer.json").write_text(""), BROKEN),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), BROKEN),
    "no UTF-8": (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe"), BROKEN),
    "a list": (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), BROKEN),
    "no words": (without_tokens, "model.no-words"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_folder_without_a_tokenizer_that_reads(tiny_model, tmp_path, case):
    """transformers makes up a tokenizer of no words where there is none, and every text is then token 0."""
    spoil, code = TOKENIZERS[case]
    copy = edited(tiny_model, tmp_path)
    spoil(copy)
    with refused_in_one_line(ModelError, code, copy):
        load_tokenizer(resolve_folder(copy))


def test_a_tokenizer_with_more_tokens_than_the_embedding(tmp_path):
    copy = tiny.write_model(tmp_path / "copy", vocab_size=300)  # the tokenizer has up to 320
    with refused(ModelError, "model.no-embedding", "token 319 ", "0 to 299"):
        load_tokenizer(resolve_folder(copy))
    load_tokenizer(resolve_folder(tiny.write_model(tmp_path / "padded", vocab_size=384)))  # as many models are


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(tiny_model, tmp_path, text):
    copy = edited(tiny_model, tmp_path)
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    with refused(ModelError, "model.broken-config", copy):
        resolve(model(copy))
    with refused(ModelError, "model.broken-config", copy):
        layer_count(ModelEntry(path=str(copy)))


def test_no_more_layers_than_any_model_has(tiny_model, tmp_path):
    with refused(ModelError, "model.config-misfit", "1000000000 layers", "at most 1024"):
        layer_count(ModelEntry(path=str(edited(tiny_model, tmp_path, num_hidden_layers=10**9))))


def test_the_hash_follows_the_weights(tiny_model, tmp_path):
    copy = edited(tiny_model, tmp_path)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert resolve(model(copy)).model_hash != resolve(model(tiny_model)).model_hash


def test_a_head_size_that_vllm_gets_wrong(tmp_path):
    info = resolve(model(tiny.write_model(tmp_path / "copy", head_dim=48)))
    with refused(CapabilityError, "capability.head-size", "head size 48", "32, 64", "nearest: 32"):
        check("vllm", "float32", "default", info)
    check("hf", "float32", "eager", info)
    check("vllm", "float32", "default", info, on_cpu=False)


@pytest.mark.parametrize(
    ("engine", "dtype", "attention", "wrong"),
    [("hg", "float32", "eager", "hg"), ("hf", "float16", "eager", "float16"), ("vllm", "bfloat16", "sdpa", "sdpa")],
)
def test_what_an_engine_cannot_do_is_refused_by_name(tiny_model, engine, dtype, attention, wrong):
    with refused(UnknownName, None, repr(wrong)):
        check(engine, dtype, attention, resolve(model(tiny_model)))

"""GGUF files of tiny random models, written as llama.cpp writes them: the inverse of what is tested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

import tiny

SHAPE = tiny.SHAPE | {"tie_word_embeddings": False, "head_dim": 32, "rms_norm_eps": 1e-6}
THETA = {"rope_theta": 5e5, "rope_type": "default"}
LOCAL = {"rope_theta": 1e4, "rope_type": "default"}
KINDS = {"full_attention": THETA, "sliding_attention": LOCAL}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, rope_parameters=THETA),
    "qwen2": lambda: Qwen2Config(**SHAPE, rope_parameters=THETA),
    "qwen3": lambda: Qwen3Config(**(SHAPE | {"tie_word_embeddings": True}), rope_parameters=THETA),
    "gemma3": lambda: Gemma3TextConfig(
        **(SHAPE | {"tie_word_embeddings": True, "num_hidden_layers": 7, "vocab_size": 312}),
        rope_parameters=KINDS,
        sliding_window=16,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    ),
}
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_model(architecture: str):
    """A tiny model whose weights are bfloat16 values, in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture]()).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.08)
        elif name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
        else:  # a norm's, in steps that stay exact where 1 is added
            weight.data += torch.randint(-16, 16, weight.shape) / 64
        weight.data = weight.data.bfloat16().float()
    return model


def write(path: Path, architecture: str, model=None, quantised: str | None = None, **settings) -> Path:
    """The file of a model, by default a random one; `settings` are more of the metadata, None leaves one out."""
    model = model or random_model(architecture)
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": THETA["rope_theta"],
    }
    if architecture == "gemma3":
        values["attention.sliding_window"] = config.sliding_window
    for key, value in (values | settings).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(type(value))
        if add:
            add(f"{architecture}.{key}", value)
    if architecture == "gemma3":
        _add_pieces(writer, config.vocab_size)
    else:
        _add_tokenizer(writer, path.parent / "words")
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _add_tensor(writer, architecture, config, name, weight.numpy(), quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """The vocabulary and the merges of the tiny tokenizer."""
    folder.mkdir(exist_ok=True)
    tiny.write_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(vocab.index("<|endoftext|>"))


def _add_pieces(writer: GGUFWriter, size: int) -> None:
    """A sentencepiece vocabulary: bytes, letters, a space, and pairs of these."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    named, raw = ["<pad>", "<eos>", "<bos>", "<unk>"], [f"<0x{byte:02X}>" for byte in range(256)]
    pairs = [f"\u2581{letter}" for letter in letters[1:]]
    tokens = [*named, *raw, *letters, *pairs][:size]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types([3 if one in named else 6 if one in raw else 1 for one in tokens])
    for add, name in (
        (writer.add_pad_token_id, "<pad>"),
        (writer.add_eos_token_id, "<eos>"),
        (writer.add_bos_token_id, "<bos>"),
        (writer.add_unk_token_id, "<unk>"),
    ):
        add(tokens.index(name))


def _add_tensor(writer, architecture: str, config, name: str, values: np.ndarray, quantised: str | None) -> None:
    module, _, last = name.rpartition(".")
    layer = module.split(".")[2] if module.startswith("model.layers.") else None
    names = MODULES | (OF_GEMMA if architecture == "gemma3" else {})
    stored = names[module if layer is None else ".".join(module.split(".")[3:])]
    if architecture == "llama" and stored in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if stored == "attn_q" else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and last == "weight" and "norm" in module:
        values = values + 1
    stored = stored if layer is None else f"blk.{layer}.{stored}"
    if quantised and values.ndim == 2:
        kind = GGMLQuantizationType[quantised]
        writer.add_tensor(f"{stored}.{last}", quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(f"{stored}.{last}", np.ascontiguousarray(values))

"""A model, a tokenizer and a text small enough for tests, made on the spot and never trained."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
WINDOW = 24  # tokens that layers with a window see
SLIDES = {  # kinds of models with one, and what makes them so
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "gemma3": {"sliding_window": WINDOW},
}
CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}


def write_model(folder: Path, kind: str = "qwen2", seed: int = 0, **changes) -> Path:
    """A random model with enough spread in its weights that its predictions are not uniform."""
    config_class, model_class, extra = CLASSES[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**(SHAPE | extra | changes)))
    for name, weight in model.named_parameters():
        if name.endswith("bias") or (kind == "gemma3" and name.endswith("norm.weight")):
            torch.nn.init.normal_(weight, std=0.5)
        elif weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def edit(file: Path, **changes) -> None:
    """Other fields in a file of JSON, as a model's config is."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE over the tiny text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs(50), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def paragraphs(count: int, seed: int = 0) -> list[str]:
    """Paragraphs of invented words, all different."""
    chance = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ren", "tu", "sha", "vo", "pel", "dri", "an"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(400)]
    return [" ".join(chance.choices(words, k=60)) + "." for _ in range(count)]


def write_text(path: Path, count: int = 120, seed: int = 0) -> Path:
    """The text as a file, a blank line between paragraphs."""
    path.write_text("\n\n".join(paragraphs(count, seed)))
    return path

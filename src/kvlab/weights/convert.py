"""A GGUF file as the folder of a model: weights dequantised one tensor at a time, configuration, tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from kvlab.codecs.stream.tensor_file import TensorFileWriter
from kvlab.core.decoder import HEAD
from kvlab.core.errors import ModelError
from kvlab.core.weights import WHOLE
from kvlab.weights.gguf_file import ARCHITECTURES, SETTINGS, SLIDING, GgufFile

DTYPE = "bfloat16"  # of the weights that are written
MIXED = "def f(x):\n    return x ** 2  # 1024 tokens\n\nÉtude in C♯, 東京 2020: “it’s fine…” <|im_start|>user\n"
SPECIAL = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
# What llama.cpp sets for every Gemma 3 by itself and a file does not say: which layers are full, and the others' base.
GEMMA_FULL_EVERY, GEMMA_LOCAL_THETA = 6, 10000.0
SPACE = "\u2581"  # how sentencepiece spells one


def convert(file: GgufFile, out: Path, config: Path | None = None) -> None:
    """Write the model of a file into a folder: config.json, generation_config.json, tokenizer and weights.

    Weights are products of stored values and scales in float32, rounded to bfloat16 once; one tensor is held at a time.

    Parameters
    ----------
    file : GgufFile
        What is read.
    out : Path
        A folder that is there and empty.
    config : Path, optional
        Folder of a config.json that the model is known by; otherwise it is made of the file's metadata.

    Raises
    ------
    ModelError
        Tensors and configuration are not of one model (``model.other-tensors``), or the tokenizer that transformers
        makes of the file is not the file's own (``model.other-tokenizer``).
    """
    known = AutoConfig.from_pretrained(config) if config else configuration(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    known.architectures, known.dtype = [type(model).__name__], DTYPE
    known.save_pretrained(out)
    GenerationConfig.from_model_config(known).save_pretrained(out)
    _write_tokenizer(file, out)
    shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    if known.tie_word_embeddings:
        del shapes[HEAD]
    _write_weights(file, known, dict(sorted(shapes.items())), out / WHOLE)


def configuration(file: GgufFile) -> PretrainedConfig:
    """What the metadata of a file say of the model; its `model_type` decides which settings there are."""
    values = {name: file.setting(key) for key, name in SETTINGS.items() if file.setting(key) is not None}
    values |= {name: said for name, key in SPECIAL.items() if (said := file.said(f"tokenizer.ggml.{key}")) is not None}
    values["rms_norm_eps"] = _shortest(values["rms_norm_eps"])
    values.setdefault("vocab_size", len(file.tokens))
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for key in ("rope.dimension_count", "attention.value_length"):
        if (said := file.setting(key, values["head_dim"])) != values["head_dim"]:
            raise ModelError(
                f"{file.path} sets {key} to {said}; allowed: {values['head_dim']}, the size of a head",
                code="model.gguf-setting",
            )
    rope = {"rope_type": "default", "rope_theta": _shortest(file.setting("rope.freq_base"))}
    if file.architecture == "gemma3":
        sliding, full = "sliding_attention", "full_attention"
        layers = range(1, values["num_hidden_layers"] + 1)
        values["layer_types"] = [full if layer % GEMMA_FULL_EVERY == 0 else sliding for layer in layers]
        values["sliding_window"] = file.setting(SLIDING)
        values["query_pre_attn_scalar"] = values["head_dim"]
        rope = {full: rope, sliding: {"rope_type": "default", "rope_theta": GEMMA_LOCAL_THETA}}
    elif file.architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return AutoConfig.for_model(ARCHITECTURES[file.architecture], rope_parameters=rope, **values)


def _shortest(value: float) -> float:
    """The number that was written into a file's float32, such as 1e-06, of which that is 9.99999997e-07."""
    return float(str(np.float32(value)))


def _write_weights(file: GgufFile, config: PretrainedConfig, shapes: dict[str, tuple[int, ...]], out: Path) -> None:
    stored = _stored_names(file.architecture, config.num_hidden_layers, shapes)
    missing = sorted(set(stored.values()) - file.tensors.keys())
    unknown = sorted(file.tensors.keys() - set(stored.values()))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, for which its model has no place"
        raise ModelError(f"{file.path} {what}, so its weights are those of another model", code="model.other-tensors")
    with open(out, "wb") as whole:
        writer = TensorFileWriter(whole, DTYPE, shapes, {"format": "pt"})
        for name, shape in tqdm(shapes.items(), desc="dequantise", unit="tensor", mininterval=1):
            found = _as_transformers(file.architecture, config, stored[name], file.values(stored[name]))
            if found.shape != shape:
                raise ModelError(
                    f"{stored[name]} of {file.path} has shape {list(found.shape)}; its model's is {list(shape)}",
                    code="model.other-tensors",
                )
            writer.add(name, torch.from_numpy(np.array(found)))
        writer.close()


def _stored_names(architecture: str, layers: int, names: Iterable[str]) -> dict[str, str]:
    """What a file calls tensors, by transformers' names."""
    kind = next(one for one, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(kind, layers)
    parts = {name: name.rpartition(".") for name in names}
    return {name: f"{known.get_name(module)}.{last}" for name, (module, _, last) in parts.items()}


def _as_transformers(architecture: str, config: PretrainedConfig, stored: str, values: np.ndarray) -> np.ndarray:
    """A tensor as transformers has it, where a file keeps it in another form.

    Llama's pairs of rotated dimensions lie side by side in a file, and half a head apart there; a norm's weight of
    Gemma has 1 added in a file.
    """
    if architecture == "llama" and (".attn_q." in stored or ".attn_k." in stored):
        heads = config.num_attention_heads if ".attn_q." in stored else config.num_key_value_heads
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and stored.endswith("norm.weight"):
        return values - 1
    return values


def _write_tokenizer(file: GgufFile, out: Path) -> None:
    """The tokenizer that transformers makes of the file, once its ids are the file's own, and it is read back alike."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.gguf").symlink_to(file.path.resolve())  # beside it no other file is looked at
        made = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf", trust_remote_code=False)
    found = made.convert_ids_to_tokens(range(len(file.tokens)))
    wrong = [number for number, token in enumerate(file.tokens) if _spelled(token) != _spelled(found[number])]
    if wrong:
        raise ModelError(
            f"token {wrong[0]} of {file.path} is {file.tokens[wrong[0]]!r}, and {found[wrong[0]]!r} to transformers"
            f" ({len(wrong)} differ)",
            code="model.other-tokenizer",
        )
    if file.begins_texts:  # which transformers leaves out
        made.add_bos_token = True
    made.save_pretrained(out)
    stored = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    ids = made(MIXED).input_ids
    if stored(MIXED).input_ids != ids or stored.decode(ids, skip_special_tokens=False).find(MIXED) < 0:
        raise ModelError(
            f"the tokenizer of {file.path} does not write back what it reads: {MIXED!r}", code="model.other-tokenizer"
        )


def _spelled(token: str | None) -> str | None:
    """A token, with the spaces that sentencepiece writes and some files do not."""
    return token and token.replace(" ", SPACE)

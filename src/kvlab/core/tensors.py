"""What a model's files hold, against what its config.json calls for: names, shapes and types, from the headers alone.

transformers fills in what is missing (zeros for a bias, random numbers else), leaves out what it does not know, and
takes numbers of 8 bits without the scales that lie beside them. Such weights are not the model's, so they are refused
before anything is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvlab.core.decoder import HEAD, Decoder
from kvlab.core.errors import ModelError
from kvlab.core.limits import shown
from kvlab.core.weights import INDEX, weight_files, weight_map

WHOLE_TYPES = ("BF16", "F16", "F32", "F64")
IDLE = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # buffers of old files, which no engine reads
SCALES = re.compile(  # what lies beside a quantised weight
    r"[._](scale|scales|scale_inv|zeros|qzeros|zero_point|zeropoint|packed|qweight|g_idx|absmax|quant_map|SCB)$"
    r"|\.quant_state\.|_(blocks|quantizer)\b"
)
ANNOUNCED = ("quantization_config", "compression_config")  # keys of config.json
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # of ModelOpt, GPTQ and AWQ
LOAD, SAVE = "m = AutoModelForCausalLM.from_pretrained(DIR", "m.save_pretrained(NEW, save_original_format=False"
DEQUANTISED = {  # by `quant_method`: what makes transformers 5.19 write whole weights
    "bitsandbytes": f"{LOAD}).dequantize(); {SAVE})",
    "compressed-tensors": f"{LOAD}, quantization_config=CompressedTensorsConfig(dequantize=True)); {SAVE},"
    " state_dict={n: x for n, x in m.state_dict().items() if n.endswith(('weight', 'bias'))})",
    "fp8": f"{LOAD}, quantization_config=FineGrainedFP8Config(dequantize=True)); {SAVE})",
}


@dataclass(frozen=True)
class TensorHeader:
    """A tensor as a file's header has it: `dtype` is the format's name, such as ``BF16``."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def tensor_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """The tensors of safetensors files by name.

    Raises
    ------
    ModelError
        A file is none, is cut short, or two hold a tensor of the same name.
    """
    found: dict[str, TensorHeader] = {}
    for path in files:
        for name, one in _header(path):
            if name in found:
                raise ModelError(
                    f"{found[name].file} and {path} both hold {name}; remove one of them", code="model.tensor-twice"
                )
            found[name] = one
    return found


def _header(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                part = file.get_slice(name)
                yield name, TensorHeader(path, tuple(part.get_shape()), part.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is no whole safetensors file: {' '.join(str(error).split())}", code="model.broken-weights"
        ) from None


def model_tensors(path: Path, config: dict) -> tuple[Decoder, dict[str, TensorHeader]]:
    """What config.json says of a model's folder, and its tensors, which are those of that model.

    Raises
    ------
    ModelError
        In one line: the weights are quantised, or a tensor is missing, is none of the model's, or has another shape or
        type; see also `Decoder.read` and `weights.weight_files`.
    """
    refuse_announced(path, config)
    decoder, held = Decoder.read(config, path), tensor_headers(weight_files(path))
    refuse_packed(path, held, decoder)
    wrong = list(_wrong(path, held, decoder))
    if wrong:
        more = f" ({len(wrong) - 1} more tensors are wrong)" if wrong[1:] else ""
        code, line = wrong[0]
        raise ModelError(
            f"the weights of {path} are not those of the model in its config.json: {line}{more}; take config.json"
            " and weights from one and the same place",
            code=code,
        )
    if decoder.tied and HEAD in held:
        _refuse_other_head(path, held)
    return decoder, held


def refuse_announced(path: Path, config: dict) -> None:
    """`ModelError` for a folder that says of its weights that they are quantised."""
    for key in ANNOUNCED:
        if (said := config.get(key)) is not None:
            kind = said.get("quant_method") if isinstance(said, dict) else None
            why = f"{key} in config.json{f' says {shown(kind)}' if kind else ''}"
            raise ModelError(_quantised(path, why, kind), code="model.quantised")
    for name in FILES:
        if (path / name).exists():
            line = _quantised(path, f"{name} lies beside them") + f"; where they are whole, remove {name}"
            raise ModelError(line, code="model.quantised")


def refuse_packed(path: Path, held: Mapping[str, TensorHeader], decoder: Decoder) -> None:
    """`ModelError` for weights that are quantised, whether or not the folder says so."""
    known = decoder.tensors()
    scale = next((name for name in held if name not in known and SCALES.search(name)), None)
    if scale is None:
        return
    packed = next((name for name, one in held.items() if one.dtype not in WHOLE_TYPES and name != scale), None)
    why = f"{packed} is {held[packed].dtype}, beside {scale}" if packed else scale
    raise ModelError(_quantised(path, why), code="model.quantised")


def _quantised(path: Path, why: str, kind: object = None) -> str:
    """Why quantised weights are refused, and what to do."""
    line = f", or write it: {DEQUANTISED[kind]}" if isinstance(kind, str) and kind in DEQUANTISED else ""
    return (
        f"the weights of {path} are quantised ({why}), and would be taken without their scales; give the model that"
        f" they were made from, of 16 or 32 bits{line}"
    )


def _wrong(path: Path, held: Mapping[str, TensorHeader], decoder: Decoder) -> Iterator[tuple[str, str]]:
    """A code and a line for each tensor that is missing, too much, or of another shape or type than it must be."""
    due = decoder.tensors()
    optional = {HEAD: due["model.embed_tokens.weight"]} if decoder.tied else {}
    listed = weight_map(path / INDEX) if (path / INDEX).exists() else {}
    for name, shape in due.items():
        if name not in held:
            file = f", which {INDEX} puts into {listed[name]}" if name in listed else ""
            yield "model.tensor-missing", f"{name} {list(shape)} is missing{file}"
    for name, one in held.items():
        shape = (due | optional).get(name)
        if shape is None:
            if not IDLE.search(name):
                line = f"{name} {list(one.shape)} is no tensor of a {decoder.architecture} with this configuration"
                yield "model.tensor-unknown", line
        elif one.shape != shape:
            yield "model.tensor-shape", f"{name} is {list(one.shape)}, and the configuration makes it {list(shape)}"
        elif one.dtype not in WHOLE_TYPES:
            yield "model.tensor-type", f"{name} is {one.dtype}; allowed: {', '.join(WHOLE_TYPES)}"
    for name, file in listed.items():
        if name in due and name in held and held[name].file.name != file:
            yield "model.tensor-elsewhere", f"{name} lies in {held[name].file.name}, and {INDEX} says {file}"
        elif name not in held and name not in due and name not in optional and not IDLE.search(name):
            yield "model.tensor-missing", f"{name}, which {INDEX} puts into {file}, is missing"


def _refuse_other_head(path: Path, held: Mapping[str, TensorHeader]) -> None:
    """`ModelError` for a head that is said to be the embedding, and is not: transformers takes it, vLLM does not."""
    import numpy as np  # here alone: what only reads headers has no need of it

    table, head = held["model.embed_tokens.weight"], held[HEAD]
    if table.dtype != head.dtype or not np.array_equal(_raw(table, "model.embed_tokens.weight"), _raw(head, HEAD)):
        raise ModelError(
            f"tie_word_embeddings in config.json of {path} is true, and {HEAD} is not model.embed_tokens.weight; set it"
            " to false, or remove the tensor",
            code="model.other-head",
        )


def _raw(one: TensorHeader, name: str):
    """The bytes of a tensor, where they lie in the file: numpy has no bfloat16."""
    import numpy as np

    with open(one.file, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[name]["data_offsets"]
    return np.memmap(one.file, np.uint8, "r", offset=8 + size + begin, shape=(end - begin,))

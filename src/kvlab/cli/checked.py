"""Inputs of `kvlab measure` and `kvlab calibrate`, checked before torch is imported.

Tables and arrays (`records`, `excerpts`) are imported by the checks that read a file, not with this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvlab.cli.flags import DTYPES
from kvlab.codecs.catalogue import PUBLISHED
from kvlab.core.errors import CalibrationMismatch, CapabilityError, ModelError, StorageError, UserError
from kvlab.core.filekind import refuse_caches
from kvlab.core.machine import lacks_bfloat16
from kvlab.core.model import ModelInfo, folder_entry, layer_count, read_config, resolve_folder
from kvlab.core.recipe import STREAMS, Recipe

MOST_BITS = 8
BITS = 4  # where nobody said how many


def config_of(folder: Path) -> dict:
    """The config.json of a model's folder.

    Raises
    ------
    ModelError
        There is no such folder, or it holds no model that kvlab knows, or not its weights.
    """
    from kvlab.core.tensors import model_tensors

    entry = folder_entry(folder)
    config = read_config(entry)
    layer_count(entry)
    model_tensors(Path(entry.path), config)
    return config


def dtype_of(asked: str | None, config: dict) -> str:
    """What the engine computes in: as asked for; else as config.json says of the weights, where torch is quick in it.

    Else float32, which holds weights of any dtype as they are.
    """
    own = config.get("dtype") or config.get("torch_dtype")
    if asked or own not in DTYPES:
        return asked or "float32"
    return "float32" if own == "bfloat16" and lacks_bfloat16() and not _on_a_gpu() else own


def _on_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def info_of(folder: Path) -> ModelInfo:
    """A model's folder, its shape and its hash."""
    return resolve_folder(folder)


def refuse_absent(engine: str) -> None:
    """`CapabilityError` for vLLM where it is not installed."""
    if engine == "vllm" and find_spec("vllm") is None:
        raise CapabilityError("engine 'vllm' needs the package vllm, which is not installed: pip install 'kvlab[vllm]'")


@dataclass(frozen=True)
class Named:
    """A codec at some bits, as it was asked for; bits None where it has no choice of them."""

    codec: str
    bits: float | None
    recipe: Recipe

    @property
    def label(self) -> str:
        """Both in words."""
        return self.codec if self.bits is None else f"{self.codec} {self.bits:g}"


def recipes_of(codec: str, widths: Sequence[float]) -> list[Named]:
    """A codec at each width; once where it has no choice of bits.

    Raises
    ------
    UserError
        No codec has that name, or not at these bits; says which there are.
    """
    if not has_bits(codec):
        return [Named(codec, None, recipe_of(codec))]
    return [Named(codec, bits, recipe_of(codec, bits)) for bits in dict.fromkeys(widths)]


def all_recipes_of(codecs: Iterable[str], widths: Sequence[float] | None) -> list[Named]:
    """Every codec once at every width, at 4 bits where none are given; raises as `recipes_of`.

    Raises
    ------
    UserError
        Bits are given, and none of the codecs has a choice of them.
    """
    names = list(dict.fromkeys(codecs))
    found = [one for name in names for one in recipes_of(name, widths or [BITS])]
    if widths and not any(has_bits(name) for name in names):
        raise UserError(f"--bits: {' and '.join(names)} has no choice of bits; leave --bits out, or name another codec")
    return found


def recipe_of(codec: str, bits: float | None = None, v_bits: float | None = None, **settings) -> Recipe:
    """The recipe of a codec, K at `bits` and V at `v_bits`, else at 4 where it has a choice; raises as `recipes_of`.

    Other `settings` are those of `named_recipe`.
    """
    from kvlab.codecs.recipes import named_recipe

    for flag, given in (("--bits", bits), ("--v-bits", v_bits)):
        if given is not None and not 0 < given <= MOST_BITS:
            raise UserError(f"{flag} {given:g}; allowed: more than 0, at most {MOST_BITS}")
    bits = bits if bits is not None or not has_bits(codec) else BITS
    return named_recipe(codec, whole_bits(bits), whole_bits(v_bits), **settings)


def has_bits(codec: str) -> bool:
    """Whether a codec has bits to choose; so it is said of names that there are not, which `recipe_of` refuses."""
    name = codec.partition("+")[0]
    if name in PUBLISHED:
        return not PUBLISHED[name].fixed
    return name not in STREAMS or "bits" in STREAMS[name].model_fields


def whole_bits(bits: float | None) -> float | None:
    """Bits that are a whole number as one: most codecs take no other."""
    return int(bits) if bits is not None and bits == int(bits) else bits


def refuse_long(length: int, config: dict) -> None:
    """`ModelError` for windows that the model has no positions for."""
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and length >= positions:
        raise ModelError(
            f"a window of {length} tokens and one more are beyond the model's {positions} positions; give a smaller"
            " --context"
        )


def readable_text(path: Path, length: int, config: dict) -> str:
    """A text of which windows of `length` tokens are cut for this model.

    Raises
    ------
    CorpusError
        The file cannot be read, is no text, or is too short.
    ModelError
        The model has fewer positions.
    """
    from kvlab.text.excerpts import read_text, refuse_short

    refuse_long(length, config)
    text = read_text(path)
    refuse_short(path, text, length)
    return text


def calibration_file(path: Path | None) -> None:
    """Refuse what is no calibration file by its header; whether it is whole, and this model's, is seen when it is read.

    Raises
    ------
    StorageError
        There is no such file.
    CalibrationMismatch
        It is another file.
    """
    from kvlab.core.records import from_header

    if path is None:
        return
    if not path.is_file():
        raise StorageError(f"cannot read {path}: no such file; write it with `kvlab calibrate`")
    refuse_caches(path)
    try:
        with safe_open(path, "np") as file:
            said = from_header(file.metadata())
    except (OSError, SafetensorError, ValueError):
        said = {}
    if said.get("format") != "kvlab-calibration":
        raise CalibrationMismatch(f"{path} is not what `kvlab calibrate` writes")


def writable(path: Path | None) -> None:
    """`StorageError` when a file cannot be written there: known before minutes of measuring, not after."""
    if path is None:
        return
    if path.is_dir():
        raise StorageError(f"cannot write {path}: it is a folder; name a file")
    folder = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise StorageError(f"cannot write {path}: folder {folder} cannot be written")

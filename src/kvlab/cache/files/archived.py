"""A whole cache as an archive, and back: what is put away, or handed over after a prefill."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from kvlab.cache.files.calibration import load_calibration, read_header
from kvlab.cache.files.computed import cache_of
from kvlab.calibration.archive import Archive
from kvlab.codecs.archive.file import ArchiveFile, load
from kvlab.codecs.archive.model import STREAMS
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.stream.seal import Key
from kvlab.codecs.stream.tensor_file import TensorFileWriter
from kvlab.core.errors import CalibrationMismatch, CapabilityError, StorageError
from kvlab.core.filekind import is_calibration_file
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Model
from kvlab.core.recipe import Recipe
from kvlab.core.records import atomic, to_header


def encode_text(
    model: Model, recipe_path: Path, text: str, bits: float | None, dtype: str, out: Path, key: Key | None = None
) -> bytes:
    """Write the cache that transformers computes of a text as an archive; what was written.

    Parameters
    ----------
    recipe_path : Path
        What `kvlab calibrate` wrote.
    bits : float or None
        Other than those of the recipe.

    Raises
    ------
    CapabilityError
        The recipe is of a codec that sees one tensor at a time.
    ModelError
        The text has more tokens than the model has positions, or too few.
    """
    info = resolve(model)
    archive, recipe = _archive(recipe_path, info)
    if bits is not None:
        recipe = named_recipe(recipe.k.codec, bits, block_size=recipe.k.block_size)
    ids, kept = cache_of(info, text, dtype)
    data = archive.encode(recipe, kept, ids, key=key)
    with atomic(out) as temporary:
        Path(temporary).write_bytes(data)
    return data


def decode_archive(model: Model, recipe_path: Path, stream_path: Path, out: Path, key: Key | None = None) -> None:
    """Decode an archive into safetensors: ``layer_{l}_{k|v}`` [heads, tokens, head_dim] in the cache's dtype.

    Raises
    ------
    StreamError
        It is damaged, not signed with `key`, or of another calibration or model.
    """
    info = resolve(model)
    archive, recipe = _archive(recipe_path, info)
    file = load(read_archive(stream_path), key)
    header = file.header
    shape = (header.heads, header.tokens, header.head_dim)
    names = {f"layer_{layer}_{stream}": shape for layer in range(header.layers) for stream in STREAMS}
    identity = to_header({"model_hash": info.model_hash, "recipe_id": recipe.recipe_id})
    with atomic(out) as temporary, open(temporary, "wb") as target:
        writer = TensorFileWriter(target, header.dtype, names, identity)
        for layer, *parts in archive.decoded(file):
            for stream, x in zip(STREAMS, parts, strict=True):
                writer.add(f"layer_{layer}_{stream}", x.to(getattr(torch, header.dtype)))
        writer.close()


def described(path: Path, key: Key | None = None) -> Iterable[str]:
    """`describe` of a file; `StreamError` when it is damaged, or not signed with `key`."""
    data = read_archive(path)
    return [f"{path}:", *describe(load(data, key), len(data))]


def describe(file: ArchiveFile, nbytes: int) -> Iterable[str]:
    """What an archive is, line by line."""
    header = file.header
    yield f"archive: {nbytes} bytes, {8 * nbytes / header.values:.4f} bits per value, quality {header.quality}"
    yield (
        f"layers {header.layers}, KV heads {header.heads}, head_dim {header.head_dim}, tokens {header.tokens} in"
        f" {header.blocks} blocks, coded from {header.dtype}"
    )
    yield f"recipe {header.recipe_id}, calibration {header.calibration_hash}, model {header.model_hash}"


def read_archive(path: Path) -> bytes:
    """The bytes of a file; `StorageError` when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", code="storage.cannot-read") from None


def _archive(path: Path, info: ModelInfo) -> tuple[Archive, Recipe]:
    """The fitted codec of a calibration's file, and its recipe."""
    if (
        not is_calibration_file(path) or (recipe := read_header(path).recipe).k.codec != "archive"
    ):  # the only one whose files say what they are of
        raise CapabilityError(
            f"{path} is not of `archive`, and this is an archive or is to be one; give the file that `kvlab calibrate"
            " --codec archive --out archive.kv` writes",
            code="capability.no-archive",
        )
    found = load_calibration(path, info)
    if found is None or found.archive is None:
        raise CalibrationMismatch(
            f"{path} holds no fitted archive; write it again with `kvlab calibrate`", code="calibration.missing"
        )
    return found.archive, recipe

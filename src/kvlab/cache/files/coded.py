"""Coded caches as files: encode that of a text or of a window of a capture, decode a file, say what is in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from kvlab.cache.files.computed import cache_of
from kvlab.cache.files.prepared import prepared
from kvlab.cache.files.recipe import RecipeFile, read_recipe_file
from kvlab.calibration.capture import SAMPLE_DTYPE, Captured
from kvlab.codecs.base import Site
from kvlab.codecs.stream.bitstream import STREAMS
from kvlab.codecs.stream.cache_file import CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codecs.stream.seal import Key
from kvlab.codecs.stream.tensor_file import TensorFileWriter
from kvlab.core.errors import CalibrationMismatch, CapabilityError, StreamError, UserError
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Model
from kvlab.core.records import atomic, to_header


def cache_codec(file: RecipeFile, info: ModelInfo) -> CacheCodec:
    """The codecs that a recipe file names, with the identities of what they need.

    Raises
    ------
    ParamsError
        The recipe names a layer that the model does not have.
    CalibrationMismatch
        The calibration is missing or belongs to another model.
    """
    ready = prepared(file, info)
    k, v = (partial(ready.codec, stream) for stream in STREAMS)
    return CacheCodec(ready.identity, ready.calibration_hash, k, v, frozenset(ready.layers))


def encode(
    model: Model, recipe_path: Path, capture_path: Path, window: int, out: Path, key: Key | None = None
) -> CacheReader:
    """Write the context of one window of a capture's sample as a coded cache, signed where there is a key.

    `window` counts the windows of the sample from 0. One layer's K or V is in memory at a time.

    Raises
    ------
    UserError
        The sample has no such window.
    CapabilityError
        The recipe codes K after its rotary embedding; the capture holds it before.
    CalibrationMismatch
        The capture or the calibration belongs to another model.
    """
    info = resolve(model)
    file = read_recipe_file(recipe_path)
    if file.recipe.rotary == "after":
        raise CapabilityError(
            f"recipe {file.recipe.recipe_id} codes K after its rotary embedding, and {capture_path} holds it before;"
            " give a recipe with rotary: before",
            code="capability.rotary",
        )
    captured = Captured(capture_path, info.model_hash)
    kept = len(captured.sampled)
    if not 0 <= window < kept:
        raise UserError(
            f"{capture_path} keeps {kept} windows, there is no window {window}; allowed: 0..{kept - 1}",
            code="user.no-such-window",
        )
    source = CacheSource(captured.context, SAMPLE_DTYPE, partial(captured.window, place=window), window)
    return _written(info, cache_codec(file, info), source, out, key)


def encode_text(
    model: Model, recipe_path: Path, text: str, dtype: str, out: Path, key: Key | None = None
) -> CacheReader:
    """Write the cache that transformers computes of a text as a coded cache, signed where there is a key.

    Raises
    ------
    ModelError
        The text has more tokens than the model has positions, or too few.
    CalibrationMismatch
        The calibration belongs to another model.
    CapabilityError
        The recipe is of a codec that sees all layers at once.
    """
    info, file = resolve(model), read_recipe_file(recipe_path)
    codec = cache_codec(file, info)
    ids, kept = cache_of(info, text, dtype, file.recipe.placement)
    return _written(info, codec, CacheSource(len(ids), dtype, lambda layer, stream: kept[layer, stream]), out, key)


class CacheSource(NamedTuple):
    """K and V that are coded: how many tokens, in what, one layer's by `of`, and the window's number for the codec."""

    tokens: int
    dtype: str
    of: Callable[[int, str], Tensor]
    window: int = 0


def _written(info: ModelInfo, codec: CacheCodec, source: CacheSource, out: Path, key: Key | None) -> CacheReader:
    """Encode one layer's K or V after the other."""
    header = CacheHeader(
        layers=info.n_layers,
        heads=info.n_kv_heads,
        head_dim=info.head_dim,
        tokens=source.tokens,
        dtype=source.dtype,
        recipe_id=codec.recipe_id,
        calibration_hash=codec.calibration_hash,
        model_hash=info.model_hash,
    )
    with atomic(out) as temporary, open(temporary, "wb") as file:
        writer = CacheWriter(file, header, key)
        for layer, stream in header.frames:
            x = source.of(layer, stream)
            writer.add(codec.of(layer, stream).encode(x, Site(source.window, layer, stream)))
        writer.close()
    return CacheReader(out, key)


def decode(model: Model, recipe_path: Path, stream_path: Path, out: Path, key: Key | None = None) -> None:
    """Decode a whole file into safetensors: ``layer_{l}_{k|v}`` [heads, tokens, head_dim] in the cache's dtype.

    K is the one before its rotary embedding, or after it where the recipe's ``rotary`` is so; the header says which.
    One layer's K or V is in memory at a time.

    Raises
    ------
    CalibrationMismatch
        The cache is another model's.
    StreamError
        It was coded by another recipe, on other layers or with another calibration, is damaged, or is not signed
        with `key`.
    """
    info, reader = resolve(model), CacheReader(stream_path, key)
    header = reader.header
    if header.model_hash != info.model_hash:
        raise CalibrationMismatch(
            f"{stream_path} is a cache of model {header.model_hash}, this is {info.model_hash}",
            code="calibration.other-model",
        )
    if (header.layers, header.heads, header.head_dim) != (info.n_layers, info.n_kv_heads, info.head_dim):
        raise StreamError(
            f"{stream_path} does not have the layers, heads and dimensions of its own model", code="stream.other-shape"
        )
    file = read_recipe_file(recipe_path)
    codec = cache_codec(file, info)
    codec.check(header)
    shapes = {_name(*frame): (header.heads, header.tokens, header.head_dim) for frame in header.frames}
    whose = {"model_hash": info.model_hash, "recipe_id": codec.recipe_id, "rotary": file.recipe.rotary}
    identity = to_header(whose)
    with atomic(out) as temporary, open(temporary, "wb") as target:
        writer = TensorFileWriter(target, header.dtype, shapes, identity)
        for frame in header.frames:
            writer.add(_name(*frame), codec.decode(reader, *frame))
        writer.close()


def _name(layer: int, stream: str) -> str:
    return f"layer_{layer}_{stream}"


def describe(reader: CacheReader) -> Iterable[str]:
    """What a coded cache is, line by line; every frame is read and checked."""
    header = reader.header
    yield f"{reader.path}: {reader.nbytes} bytes, {reader.bits_per_value:.4f} bits per value"
    yield (
        f"layers {header.layers}, KV heads {header.heads}, head_dim {header.head_dim}, tokens {header.tokens}, "
        f"coded from {header.dtype}"
    )
    yield f"recipe {header.recipe_id}, calibration {header.calibration_hash or 'none'}, model {header.model_hash}"
    yield f"digest {reader.seal.root.hex()}, {'signed' if reader.seal.signed else 'not signed'}"
    per_frame = header.heads * header.head_dim * header.tokens
    for layer in range(header.layers):
        parts = []
        for stream in STREAMS:
            encoded, size = reader.frame(layer, stream), reader.frame_bytes(layer, stream)
            parts.append(f"{stream.upper()} {8 * size / per_frame:7.4f} bits in {len(encoded.blocks)} blocks")
        yield f"layer {layer:3d}  " + "   ".join(parts)

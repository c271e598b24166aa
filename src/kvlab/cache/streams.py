"""Coded caches as files: encode a window of a capture's sample, decode a file, say what is in one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from kvlab.base.errors import CalibrationMismatch, CapabilityError, StreamError, UserError
from kvlab.base.model import ModelInfo, resolve
from kvlab.base.params import Params
from kvlab.base.records import atomic, to_header
from kvlab.cache.prepared import prepared
from kvlab.cache.recipe_file import RecipeFile, read_recipe_file
from kvlab.calibration.capture import SAMPLE_DTYPE, Captured
from kvlab.codec.base import Site
from kvlab.codec.stream.bitstream import STREAMS
from kvlab.codec.stream.cache_file import CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codec.stream.seal import Key
from kvlab.codec.stream.tensor_file import TensorFileWriter


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
    params: Params, recipe_path: Path, capture_path: Path, window: int, out: Path, key: Key | None = None
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
    info = resolve(params.model)
    file = read_recipe_file(recipe_path)
    if file.recipe.rotary == "after":
        raise CapabilityError(
            f"recipe {file.recipe.recipe_id} codes K after its rotary embedding, and {capture_path} holds it before;"
            " give a recipe with rotary: before"
        )
    captured = Captured(capture_path, info.model_hash)
    kept = len(captured.sampled)
    if not 0 <= window < kept:
        raise UserError(f"{capture_path} keeps {kept} windows, there is no window {window}; allowed: 0..{kept - 1}")
    codec = cache_codec(file, info)
    header = CacheHeader(
        layers=info.n_layers,
        heads=info.n_kv_heads,
        head_dim=info.head_dim,
        tokens=captured.context,
        dtype=SAMPLE_DTYPE,
        recipe_id=codec.recipe_id,
        calibration_hash=codec.calibration_hash,
        model_hash=info.model_hash,
    )
    with atomic(out) as temporary, open(temporary, "wb") as file:
        writer = CacheWriter(file, header, key)
        for layer, stream in header.frames:
            x = captured.window(layer, stream, window)
            writer.add(codec.of(layer, stream).encode(x, Site(window, layer, stream)))
        writer.close()
    return CacheReader(out, key)


def decode(params: Params, recipe_path: Path, stream_path: Path, out: Path, key: Key | None = None) -> None:
    """Decode a whole file into safetensors: ``layer_{l}_{k|v}`` [heads, tokens, head_dim] in the cache's dtype.

    One layer's K or V is in memory at a time.

    Raises
    ------
    CalibrationMismatch
        The cache is another model's.
    StreamError
        It was coded by another recipe, on other layers or with another calibration, is damaged, or is not signed
        with `key`.
    """
    info, reader = resolve(params.model), CacheReader(stream_path, key)
    header = reader.header
    if header.model_hash != info.model_hash:
        raise CalibrationMismatch(f"{stream_path} is a cache of model {header.model_hash}, this is {info.model_hash}")
    if (header.layers, header.heads, header.head_dim) != (info.n_layers, info.n_kv_heads, info.head_dim):
        raise StreamError(f"{stream_path} does not have the layers, heads and dimensions of its own model")
    codec = cache_codec(read_recipe_file(recipe_path), info)
    codec.check(header)
    shapes = {_name(*frame): (header.heads, header.tokens, header.head_dim) for frame in header.frames}
    identity = to_header({"model_hash": info.model_hash, "recipe_id": codec.recipe_id})
    with atomic(out) as temporary, open(temporary, "wb") as file:
        writer = TensorFileWriter(file, header.dtype, shapes, identity)
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

"""Coded caches as files: encode a captured window, decode a file, say what is in one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvlab.calibration import load as calibration
from kvlab.calibration.capture import Captured
from kvlab.calibration.load import Fitted
from kvlab.codec.base import Site
from kvlab.codec.bitstream import STREAMS
from kvlab.codec.cache_file import CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codec.registry import build
from kvlab.dropins.recipe_file import RecipeFile, read_recipe_file
from kvlab.errors import CalibrationMismatch, UserError
from kvlab.model import ModelInfo, resolve
from kvlab.params import Params
from kvlab.records import atomic, to_header


def cache_codec(file: RecipeFile, info: ModelInfo) -> CacheCodec:
    """The codecs that a recipe file names, with the identities of what they need.

    Raises
    ------
    CalibrationMismatch
        The calibration belongs to another model, or the recipe names a layer that the model does not have.
    """
    fitted = None
    if file.calibration is not None:
        fitted = calibration.load(Fitted(**dict(file.calibration)), info.model_hash)
    layers = frozenset(range(info.n_layers) if file.layers is None else file.layers)
    if not layers <= frozenset(range(info.n_layers)):
        raise CalibrationMismatch(
            f"the recipe file codes layer {max(layers)}, the model has layers 0..{info.n_layers - 1}"
        )
    k, v = (
        build(recipe, fitted.stream(recipe, stream) if fitted else None)
        for stream, recipe in (("k", file.recipe.k), ("v", file.recipe.v))
    )
    return CacheCodec(file.recipe.recipe_id, fitted.calibration_hash if fitted else None, k, v, layers)


def encode(params: Params, recipe_path: Path, capture_path: Path, window: int, out: Path) -> CacheReader:
    """Write the context of one captured window as a coded cache; one layer is in memory at a time."""
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    codec = cache_codec(read_recipe_file(recipe_path), info)
    header = CacheHeader(
        layers=info.n_layers,
        heads=info.n_kv_heads,
        head_dim=info.head_dim,
        tokens=captured.context,
        dtype=captured.dtype,
        recipe_id=codec.recipe_id,
        calibration_hash=codec.calibration_hash,
        model_hash=info.model_hash,
    )
    with atomic(out) as temporary, open(temporary, "wb") as file:
        writer = CacheWriter(file, header)
        for layer, stream in header.frames:
            windows = captured.layer(layer, stream)
            if not 0 <= window < len(windows):
                raise UserError(f"window {window} was not captured; allowed: 0..{len(windows) - 1}")
            x = windows[window, :, : captured.context].to(getattr(torch, captured.dtype))
            writer.add(codec.of(layer, stream).encode(x, Site(window, layer, stream)))
        writer.close()
    return CacheReader(out)


def decode(params: Params, recipe_path: Path, stream_path: Path, out: Path) -> None:
    """Decode a whole file into safetensors: ``layer_{l}_{k|v}`` [heads, tokens, head_dim] in the cache's dtype."""
    info, reader = resolve(params.model), CacheReader(stream_path)
    if reader.header.model_hash != info.model_hash:
        raise CalibrationMismatch(
            f"{stream_path} is a cache of model {reader.header.model_hash}, this model is {info.model_hash}"
        )
    codec = cache_codec(read_recipe_file(recipe_path), info)
    dtype = getattr(torch, reader.header.dtype)
    tensors = {
        f"layer_{layer}_{stream}": codec.decode(reader, layer, stream).to(dtype)
        for layer, stream in reader.header.frames
    }
    identity = {"model_hash": info.model_hash, "recipe_id": codec.recipe_id}
    with atomic(out) as temporary:
        save_file(tensors, temporary, metadata=to_header(identity))


def describe(reader: CacheReader) -> Iterable[str]:
    """What a coded cache is, line by line; every block's checksum is looked at."""
    header = reader.header
    yield f"{reader.path}: {reader.nbytes} bytes, {reader.bits_per_value:.4f} bits per value"
    yield (
        f"layers {header.layers}, KV heads {header.heads}, head_dim {header.head_dim}, tokens {header.tokens}, "
        f"coded from {header.dtype}"
    )
    yield f"recipe {header.recipe_id}, calibration {header.calibration_hash or 'none'}, model {header.model_hash}"
    per_frame = header.heads * header.head_dim * header.tokens
    for layer in range(header.layers):
        parts = []
        for stream in STREAMS:
            encoded, size = reader.frame(layer, stream), reader.frame_bytes(layer, stream)
            parts.append(f"{stream.upper()} {8 * size / per_frame:7.4f} bits in {len(encoded.blocks)} blocks")
        yield f"layer {layer:3d}  " + "   ".join(parts)

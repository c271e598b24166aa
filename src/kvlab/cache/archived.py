"""A whole cache as an archive, and back: what is put away, or handed over after a prefill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from kvlab.base.errors import CalibrationMismatch, CapabilityError, ModelError, StorageError
from kvlab.base.model import ModelInfo, load_tokenizer, resolve
from kvlab.base.params import Params
from kvlab.base.recipe import WHOLE, ArchiveStream, Recipe
from kvlab.base.records import atomic, to_header
from kvlab.cache.calibration_file import is_calibration_file, load_calibration, read_header
from kvlab.calibration.archive import Archive
from kvlab.codec.archive.codec import Body
from kvlab.codec.archive.file import ArchiveFile, ArchiveHeader, dump, load
from kvlab.codec.archive.model import STREAMS
from kvlab.codec.recipes import named_recipe
from kvlab.codec.stream.seal import Key
from kvlab.codec.stream.tensor_file import TensorFileWriter
from kvlab.engines.base import Part
from kvlab.engines.registry import start


def archived(
    archive: Archive,
    recipe: Recipe,
    cache: Mapping[tuple[int, str], Tensor],
    ids: Sequence[int],
    starts: bool = True,
    key: Key | None = None,
) -> bytes:
    """The file of a cache.

    Parameters
    ----------
    archive : Archive
        The fitted codec.
    recipe : Recipe
        Says the bits, or the quality.
    cache : mapping
        By layer and stream, K before its rotary embedding, float [kv_heads, tokens, head_dim].
    ids : sequence of int
        Its tokens.
    starts : bool
        Whether the first of them is the first of its text.
    key : Key, optional
        Sign with it.

    Raises
    ------
    CapabilityError
        The bits cannot be met.
    CalibrationMismatch
        The calibration holds what decodes alone.
    NonFinite
        A value is NaN or infinite.
    """
    settings, sample, layers = recipe.k, cache[0, "k"], archive.fitted.layers
    heads, tokens, head_dim = sample.shape
    beside = ArchiveHeader.overhead(layers, tokens, settings.block_size)
    body = coded(archive, settings, cache, ids, settings.block_size, beside, starts)
    header = ArchiveHeader(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        tokens=tokens,
        block=settings.block_size,
        quality=body.quality,
        dtype=str(sample.dtype).removeprefix("torch."),
        starts=starts,
        recipe_id=recipe.recipe_id,
        calibration_hash=archive.digest,
        model_hash=archive.info.model_hash,
    )
    return dump(body, header, ids, key)


def coded(
    archive: Archive,
    settings: ArchiveStream,
    cache: Mapping[tuple[int, str], Tensor],
    ids: Sequence[int],
    block: int,
    beside: int,
    starts: bool = True,
) -> Body:
    """A cache in blocks of so many tokens, at the quality or the bits of a recipe; raises as `archived`.

    Parameters
    ----------
    cache : mapping
        As `archived` takes it. It is asked for one layer's K or V at a time, several times over, so that it need not
        hold them.
    beside : int
        Bytes that will be stored with what the entropy coder wrote; the bits count them.
    """
    codec, layers, sample = archive.codec(block), archive.fitted.layers, cache[0, "k"]
    expected = archive.expected(Keys(cache, layers))
    if settings.bits is None:
        return codec.encode(cache, ids, expected, settings.quality, starts)
    return codec.encode_to(cache, ids, expected, settings.bits * 2 * layers * sample.numel() / 8, beside, starts)


class Keys(Mapping[int, Tensor]):
    """K of a cache by layer, each asked for when it is needed."""

    def __init__(self, cache: Mapping[tuple[int, str], Tensor], layers: int):
        self._cache, self._layers = cache, layers

    def __getitem__(self, layer: int) -> Tensor:
        return self._cache[layer, "k"]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._layers))

    def __len__(self) -> int:
        return self._layers


def encode_text(
    params: Params, recipe_path: Path, text: str, bits: float | None, dtype: str, out: Path, key: Key | None = None
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
    info = resolve(params.model)
    archive, recipe = _archive(recipe_path, info)
    if bits is not None:
        recipe = named_recipe(recipe.k.codec, bits, block_size=recipe.k.block_size)
    ids = load_tokenizer(info)(text)["input_ids"]
    if not 2 <= len(ids) < info.max_positions:
        raise ModelError(f"the text has {len(ids)} tokens; allowed: 2..{info.max_positions - 1}")
    kept: dict[tuple[int, Part], Tensor] = {}

    def tap(layer: int, part: Part, x: Tensor) -> None:
        """Keep K and V."""
        if part in STREAMS:
            kept[layer, part] = x.clone()

    with closing(start("hf", info, dtype, max_tokens=len(ids))) as engine:
        engine.score(ids, len(ids) - 2, tap)
    data = archived(archive, recipe, kept, ids, key=key)
    with atomic(out) as temporary:
        Path(temporary).write_bytes(data)
    return data


def decode_archive(params: Params, recipe_path: Path, stream_path: Path, out: Path, key: Key | None = None) -> None:
    """Decode an archive into safetensors: ``layer_{l}_{k|v}`` [heads, tokens, head_dim] in the cache's dtype.

    Raises
    ------
    StreamError
        It is damaged, not signed with `key`, or of another calibration or model.
    """
    info = resolve(params.model)
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
        raise StorageError(f"cannot read {path}: {error.strerror}") from None


def _archive(path: Path, info: ModelInfo) -> tuple[Archive, Recipe]:
    """The fitted codec of a calibration's file, and its recipe."""
    if not is_calibration_file(path) or (recipe := read_header(path).recipe).k.codec not in WHOLE:
        raise CapabilityError(
            f"{path} is not of a codec of whole caches; make one: kvlab calibrate --codec archive --out archive.kv"
        )
    found = load_calibration(path, info)
    if found is None or found.archive is None:
        raise CalibrationMismatch(f"{path} holds no fitted archive; write it again with `kvlab calibrate`")
    return found.archive, recipe

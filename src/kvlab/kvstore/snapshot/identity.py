"""Whose K and V a snapshot holds: everything that must be equal before one context's cache serves another.

A model's hash is that of its files. What a running engine overrides beside them, the rotary embedding above all, is
therefore named by itself, and a caller who runs with an override says so (`identity_of`). Nothing here is optional:
what is not known cannot be compared, and is refused where the identity is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from kvlab.core.codec_settings import Frozen, IdentityStream
from kvlab.core.decoder import rope_of
from kvlab.core.errors import ModelError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import WHOLE, Placement, Recipe, canonical, digest
from kvlab.core.records import file_hash, read_json
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# Fields of config.json that say nothing about K and V; the dtype is that of the weights, the cache's own is Geometry's.
IDLE_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


class CodecIdentity(Frozen):
    """What it takes to decode a coded payload.

    Parameters
    ----------
    recipe_id : str
        Of `recipe`; written down so that a person and the gate can look it up.
    recipe : Recipe
        In full: a snapshot says by itself how it is to be read.
    layers : tuple of int
        The coded ones, ascending; the others are stored as they are.
    placement : {"pre_rope", "post_rope"}
        Whether K was turned back to what it was before its rotary embedding, and so coded.
    calibration_hash : str or None
        Of the calibration's files, for a codec of whole caches of what decodes alone; None when the recipe reads none.
    """

    recipe_id: str
    recipe: Recipe
    layers: tuple[int, ...]
    placement: Placement
    calibration_hash: str | None

    @model_validator(mode="after")
    def _own_id(self) -> CodecIdentity:
        if self.recipe_id != self.recipe.recipe_id:
            raise ValueError(f"recipe_id {self.recipe_id} is not that of the recipe, {self.recipe.recipe_id}")
        return self

    @property
    def lossless(self) -> bool:
        """Whether what is decoded is what was coded, bit for bit."""
        return not self.layers or all(isinstance(stream, IdentityStream) for stream in (self.recipe.k, self.recipe.v))


class ContextIdentity(Frozen):
    """The compatibility identity of a snapshot.

    Parameters
    ----------
    model_hash : str
        Of the model's config.json and weights (`ModelInfo.model_hash`).
    config_hash : str
        Of what config.json says apart from the rotary embedding and from what cannot touch K and V.
    tokenizer_hash : str
        Of the tokenizer's files.
    rope : dict
        The rotary embedding's parameters, as they ran.
    geometry : Geometry
        Layout and dtype.
    codec : CodecIdentity or None
        None for a payload that is stored as it is.
    salt : str
        Whatever else keeps contexts apart: an adapter, a tenant. Part of the token chain too.
    """

    model_hash: str = Field(min_length=1)
    config_hash: str = Field(min_length=1)
    tokenizer_hash: str = Field(min_length=1)
    rope: dict[str, JsonValue] = Field(min_length=1)
    geometry: Geometry
    codec: CodecIdentity | None = None
    salt: str = ""

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical JSON, 32 bytes."""
        return hashlib.sha256(canonical(self).encode()).digest()

    def coded(self, codec: CodecIdentity | None) -> ContextIdentity:
        """The same context under another codec."""
        return self.model_copy(update={"codec": codec})


def identity_of(
    info: ModelInfo,
    dtype: Literal["float32", "bfloat16", "float16"],
    chunk_tokens: int = 64,
    *,
    rope: Mapping[str, JsonValue] | None = None,
    salt: str = "",
) -> ContextIdentity:
    """The identity of a context of a model.

    Parameters
    ----------
    info : ModelInfo
        The model; its folder is read.
    dtype : str
        Of K and V.
    chunk_tokens : int
        Tokens of a chunk.
    rope : mapping, optional
        `rope_of` the configuration that really runs, when that may be another than config.json's.
    salt : str
        See `ContextIdentity`.

    Raises
    ------
    ModelError
        The folder has no tokenizer, or config.json holds NaN or infinity.
    """
    config = read_json(info.path / "config.json")
    files = [name for name in TOKENIZER_FILES if (info.path / name).is_file()]
    if not files:
        raise ModelError(
            f"{info.path} has no tokenizer, so whose tokens a snapshot holds could not be said",
            code="model.no-tokenizer",
        )
    rest = {name: value for name, value in config.items() if name not in (*ROPE_FIELDS, *IDLE_FIELDS)}
    try:
        config_hash = digest(rest)
    except ValueError:
        raise ModelError(f"{info.path / 'config.json'} holds NaN or infinity", code="model.config-not-finite") from None
    return ContextIdentity(
        model_hash=info.model_hash,
        config_hash=config_hash,
        tokenizer_hash=digest({name: file_hash(info.path / name) for name in files}),
        rope=dict(rope_of(config) if rope is None else rope),
        geometry=Geometry(info.n_layers, info.n_kv_heads, info.head_dim, dtype, chunk_tokens),
        salt=salt,
    )


def differences(found: ContextIdentity, expected: ContextIdentity) -> list[SnapshotReason]:
    """Everything that keeps a snapshot of one identity from being used under another; empty when nothing does."""
    return [*_of_model(found, expected), *_of_layout(found.geometry, expected.geometry), *_of_codec(found, expected)]


def _of_model(found: ContextIdentity, expected: ContextIdentity) -> Iterator[SnapshotReason]:
    fields = {
        "model_hash": (Code.MODEL, "model"),
        "config_hash": (Code.CONFIG, "configuration"),
        "tokenizer_hash": (Code.TOKENIZER, "tokenizer"),
        "rope": (Code.ROPE, "rotary embedding"),
        "salt": (Code.SALT, "salt"),
    }
    for field, (code, what) in fields.items():
        ours, theirs = getattr(found, field), getattr(expected, field)
        if ours != theirs:
            yield SnapshotReason(code, f"the snapshot is of {what} {_shown(ours)}, needed is {_shown(theirs)}")


def _shown(value: str | dict) -> str:
    return canonical(value) if isinstance(value, dict) else repr(value)


def _of_layout(found: Geometry, expected: Geometry) -> Iterator[SnapshotReason]:
    if found.dtype != expected.dtype:
        yield SnapshotReason(Code.DTYPE, f"the snapshot holds {found.dtype}, needed is {expected.dtype}")
    other = [
        f"{name} {getattr(found, name)} instead of {getattr(expected, name)}"
        for name in ("layers", "kv_heads", "head_dim", "chunk_tokens")
        if getattr(found, name) != getattr(expected, name)
    ]
    if other:
        yield SnapshotReason(Code.LAYOUT, f"the snapshot's chunks have {', '.join(other)}")


def _of_codec(found: ContextIdentity, expected: ContextIdentity) -> Iterator[SnapshotReason]:
    ours, theirs = found.codec, expected.codec
    if ours == theirs:
        return
    if ours is None or theirs is None or _how(ours) != _how(theirs):
        yield SnapshotReason(Code.CODEC, f"the payload is {_coded(ours)}, needed is one that is {_coded(theirs)}")
    elif ours.calibration_hash != theirs.calibration_hash:
        yield SnapshotReason(
            Code.CALIBRATION,
            f"the payload was coded with calibration {ours.calibration_hash}, given is {theirs.calibration_hash}",
        )


def _how(codec: CodecIdentity) -> tuple:
    """What of a codec decides how its bytes are read: of `archive` no bits, for its chunks say their own quality."""
    recipe = codec.recipe
    return recipe.k.codec if recipe.k.codec in WHOLE else codec.recipe_id, codec.layers, codec.placement


def _coded(codec: CodecIdentity | None) -> str:
    if codec is None:
        return "stored as it is"
    how = f"K {codec.recipe.k.codec}, V {codec.recipe.v.codec}, {len(codec.layers)} layers, {codec.placement}"
    return f"coded by recipe {codec.recipe_id} ({how})"

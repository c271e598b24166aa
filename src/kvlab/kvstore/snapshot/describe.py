"""A snapshot for people and for programs: what it says of itself, without its payload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvlab.core.errors import StorageError
from kvlab.kvstore.snapshot.format import PUBLISHED_MAGIC, VERSION
from kvlab.kvstore.snapshot.read import Snapshot
from kvlab.kvstore.snapshot.v1 import GGML_TYPES, PublishedHeader

PUBLISHED = "KVFLASH1"


def as_data(snapshot: Snapshot) -> dict:
    """Everything but the payload and the tokens, ready for JSON."""
    return {
        "format": f"kvlab snapshot {VERSION}",
        "bytes": snapshot.nbytes,
        "payload_bytes": snapshot.header.payload_bytes,
        "tokens": snapshot.length,
        "digest": snapshot.digest,
        "signed": snapshot.seal.signed,
        "lossless": snapshot.manifest.lossless,
        "manifest": snapshot.manifest.model_dump(mode="json"),
        "chunks": [
            {
                "link": record.link.hex(),
                "bytes": record.nbytes,
                "digest": record.digest.hex(),
                "resident": record.entry.resident,
                "score": record.entry.score,
                "last_use": record.entry.last_use,
            }
            for record in snapshot.records
        ],
    }


def as_lines(snapshot: Snapshot) -> Iterator[str]:
    """The same in short, a line for each thing a person asks."""
    manifest, geometry = snapshot.manifest, snapshot.geometry
    identity, entries = manifest.identity, snapshot.ledger.entries
    size, per_token = snapshot.header.payload_bytes, snapshot.header.payload_bytes / snapshot.length
    shape = f"{geometry.layers} layers, {geometry.kv_heads} KV heads, head_dim {geometry.head_dim}, {geometry.dtype}"
    scored = [entry.score for entry in entries if entry.score is not None]
    yield f"{snapshot.path}: kvlab snapshot, version {VERSION}, {snapshot.nbytes} bytes"
    yield f"tokens      {snapshot.length} in {len(entries)} chunks of {geometry.chunk_tokens}"
    yield f"payload     {size} bytes, {per_token:g} a token, {_how(snapshot)}"
    yield f"layout      {shape}"
    yield f"model       {identity.model_hash}, configuration {identity.config_hash}"
    yield f"tokenizer   {identity.tokenizer_hash}"
    yield f"rope        {json.dumps(identity.rope, sort_keys=True)}"
    yield f"salt        {identity.salt!r}"
    yield f"ledger      {sum(e.resident for e in entries)} resident, {len(scored)} scored, clock {manifest.clock}"
    yield f"evidence    {', '.join(manifest.evidence) or 'none'}"
    yield f"made with   {', '.join(f'{name} {value}' for name, value in sorted(manifest.made.items())) or 'unknown'}"
    yield f"digest      {snapshot.digest}"
    signature = "there is one; `kvlab snapshot verify --key FILE` says whether it is yours"
    yield f"signature   {signature if snapshot.seal.signed else 'none'}"


def _how(snapshot: Snapshot) -> str:
    codec = snapshot.manifest.identity.codec
    if codec is None:
        return "stored as it is"
    loss = "without loss" if codec.lossless else "lossy"
    recipe = codec.recipe
    return (
        f"{loss}: recipe {codec.recipe_id} (K {recipe.k.codec}, V {recipe.v.codec}, {codec.placement}) on"
        f" {len(codec.layers)} of {snapshot.geometry.layers} layers, calibration {codec.calibration_hash or 'none'}"
    )


def is_published(path: Path | str) -> bool:
    """Whether a file begins as a KVFLASH1 snapshot does; `StorageError` when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(PUBLISHED_MAGIC)) == PUBLISHED_MAGIC
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", code="storage.cannot-read") from None


def published_data(path: Path | str) -> dict:
    """What a KVFLASH1 file says of itself; `SnapshotRefused` when its header is cut short."""
    path = Path(path)
    with path.open("rb") as file:
        header = PublishedHeader.read(file.read(PublishedHeader.SIZE))
    names = {number: name for name, number in GGML_TYPES.items()}
    return {
        "format": PUBLISHED,
        "bytes": path.stat().st_size,
        "due_bytes": header.file_bytes,
        "chunks": header.chunks,
        "chunk_tokens": header.chunk_tokens,
        "kv_heads": header.kv_heads,
        "chunk_bytes": header.chunk_bytes,
        "k_dtype": names.get(header.dtype, f"ggml type {header.dtype}"),
        "has_ledger": bool(header.has_ledger),
    }


def published_lines(path: Path | str) -> Iterator[str]:
    """The same for people, with what such a file cannot say."""
    said = published_data(path)
    yield f"{path}: {PUBLISHED}, the published layout, {said['bytes']} bytes of {said['due_bytes']} that it promises"
    yield f"chunks      {said['chunks']} of {said['chunk_tokens']} tokens, {said['chunk_bytes']} bytes each"
    yield f"layout      {said['kv_heads']} KV heads, K {said['k_dtype']}"
    yield "it names no model, tokens, rotary embedding or layers and has no checksum, so nothing is restored from it"

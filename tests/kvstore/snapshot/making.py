"""Small snapshots of planted chunks, and what is needed to take them apart."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import ChunkEntry, Ledger
from kvlab.kvstore.snapshot.identity import ContextIdentity
from kvlab.kvstore.snapshot.write import Saved, SnapshotSource, save

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=8, dtype="float32", chunk_tokens=4)
CHUNKS = 6


def identity(geometry: Geometry = GEOMETRY, **changes) -> ContextIdentity:
    fields = {
        "model_hash": "0123456789abcdef",
        "config_hash": "0123456789ab",
        "tokenizer_hash": "ba9876543210",
        "rope": {"rope_theta": 10000.0, "rope_type": "default"},
        "geometry": geometry,
    }
    return ContextIdentity(**fields | changes)


def chunk(number: int, geometry: Geometry = GEOMETRY) -> Tensor:
    """Any bits, NaN and infinity among them."""
    source = torch.Generator().manual_seed(number)
    words = torch.randint(0, 256, (geometry.chunk_bytes,), generator=source, dtype=torch.uint8)
    return words.view(geometry.torch_dtype).view(geometry.chunk_shape)


def gaussian(number: int, geometry: Geometry) -> Tensor:
    source = torch.Generator().manual_seed(number)
    return torch.randn(geometry.chunk_shape, generator=source).to(geometry.torch_dtype)


def tokens(count: int) -> list[int]:
    return [7 * n % 4096 for n in range(count)]


def ledger(chunks: int) -> Ledger:
    """Every kind of entry: resident or not, with a score or without, used early or late."""
    entries = [ChunkEntry(n % 3 != 0, None if n % 4 == 1 else n / 7 - 0.5, 11 * n % 17) for n in range(chunks)]
    return Ledger(tuple(entries), clock=40)


def source(length: int, geometry: Geometry = GEOMETRY, make=chunk, **changes) -> SnapshotSource:
    """A context of `length` tokens; the payloads come one by one, as a pager gives them."""
    count = length // geometry.chunk_tokens
    payloads = (make(number, geometry) for number in range(count))
    return SnapshotSource(identity(geometry, **changes), payloads, ledger(count), tokens(length))


def written(path: Path, chunks: int = CHUNKS, **settings) -> Saved:
    return save(path, source(chunks * GEOMETRY.chunk_tokens), **settings)


def same(ours, theirs) -> bool:
    """Whether two sequences of chunks hold the same bytes."""
    ours, theirs = tuple(ours), tuple(theirs)
    return len(ours) == len(theirs) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True)
    )


def chunks(count: int, geometry: Geometry = GEOMETRY) -> tuple[Tensor, ...]:
    return tuple(islice((chunk(number, geometry) for number in range(count)), count))

"""The published KVFLASH1 layout: read bit for bit, and refused wherever its own reader refuses, and where it should."""

from __future__ import annotations

import struct

import pytest
import torch

from kvlab.core.errors import SnapshotRefused, StorageError
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import ChunkEntry, Ledger
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.reasons import Code
from kvlab.kvstore.snapshot.v1 import read_published
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.snapshot import making
from refusals import refused

# The geometry of the published tests, whose blobs have known sizes.
GEOMETRY = Geometry(layers=1, kv_heads=2, head_dim=4, dtype="float16", chunk_tokens=64)
MAGIC = 0x4B56464C41534831
FIELDS = ("chunks", "chunk_tokens", "kv_heads", "k_segment", "v_segment", "chunk_bytes", "dtype", "has_ledger")
SCORES = (0.5, float("-inf"), -2.0, 1.0, 0.0)


def header(count: int, geometry: Geometry = GEOMETRY, magic: int = MAGIC, order: str = "<", **changes) -> bytes:
    segment = geometry.chunk_tokens * geometry.head_dim * geometry.torch_dtype.itemsize
    dtype = {"float32": 0, "float16": 1, "bfloat16": 30}[geometry.dtype]
    values = (count, geometry.chunk_tokens, geometry.kv_heads, segment, segment, geometry.chunk_bytes, dtype, 1)
    return struct.pack(f"{order}Q8I", magic, *(dict(zip(FIELDS, values, strict=True)) | changes).values())


def laid_out(payload: torch.Tensor) -> bytes:
    """A chunk as the published writer lays it out: layer by layer, K of each head, then V of each head."""
    return b"".join(
        payload[layer, part, head].contiguous().view(torch.uint8).numpy().tobytes()
        for layer in range(payload.shape[0])
        for part in (0, 1)
        for head in range(payload.shape[2])
    )


def blob(count: int, geometry: Geometry = GEOMETRY, holes=(), entries=None, **changes) -> bytes:
    bodies = [bytes(geometry.chunk_bytes) if n in holes else laid_out(making.chunk(n, geometry)) for n in range(count)]
    entries = [struct.pack("<B3xf", n % 2, SCORES[n % 5]) for n in range(count)] if entries is None else entries
    return b"".join([header(count, geometry, **changes), *bodies, *entries])


def opened(tmp_path, data: bytes, geometry: Geometry = GEOMETRY):
    (tmp_path / "v1").write_bytes(data)
    return read_published(tmp_path / "v1", geometry)


def code_of(tmp_path, data: bytes, geometry: Geometry = GEOMETRY) -> str:
    with pytest.raises(SnapshotRefused) as caught:
        opened(tmp_path, data, geometry)
    (code,) = caught.value.codes
    assert str(tmp_path / "v1") in str(caught.value)
    return code


@pytest.mark.parametrize("chunks, size", [(8, 16488), (5, 10320), (6, 12376)])
def test_blobs_of_the_published_sizes(tmp_path, chunks, size):
    data = blob(chunks)
    assert GEOMETRY.chunk_bytes == 2048 and len(data) == size and data[:8] == b"1HSALFVK"
    found = opened(tmp_path, data)
    assert making.same(found.chunks(), (making.chunk(n, GEOMETRY) for n in range(chunks)))


GEOMETRIES = [
    Geometry(layers=3, kv_heads=2, head_dim=8, dtype="float32", chunk_tokens=4),
    Geometry(layers=2, kv_heads=3, head_dim=6, dtype="bfloat16", chunk_tokens=5),
    Geometry(layers=2, kv_heads=1, head_dim=2, dtype="float16", chunk_tokens=1),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_layers_heads_k_and_v_lie_where_they_should(tmp_path, geometry):
    found = opened(tmp_path, blob(4, geometry), geometry)
    assert making.same(found.chunks(), (making.chunk(n, geometry) for n in range(4)))


def test_its_ledger_has_residency_and_scores_and_no_last_use(tmp_path):
    scores = [None if score == float("-inf") else score for score in SCORES]
    wanted = Ledger(tuple(ChunkEntry(n % 2 == 1, scores[n % 5], 0) for n in range(7)), clock=0)
    assert opened(tmp_path, blob(7)).ledger == wanted


def test_a_chunk_that_was_never_written_stays_a_hole(tmp_path):
    found = list(opened(tmp_path, blob(5, holes=(1, 3))).chunks())
    assert [chunk is None for chunk in found] == [False, True, False, True, False]


def test_it_becomes_a_snapshot_once_somebody_vouches_for_it(tmp_path):
    old, tokens = opened(tmp_path, blob(3)), making.tokens(3 * 64)
    save(tmp_path / "v2", SnapshotSource(making.identity(GEOMETRY), old.chunks(), old.ledger, tokens))
    with read.open(tmp_path / "v2") as new:
        assert making.same(new.chunks(), (making.chunk(n, GEOMETRY) for n in range(3)))
        assert new.ledger == old.ledger


OTHERS = {
    "chunk_tokens": (Code.V1_CHUNK_TOKENS, 32),
    "kv_heads": (Code.V1_KV_HEADS, 4),
    "k_segment": (Code.V1_K_SEGMENT, 511),
    "v_segment": (Code.V1_V_SEGMENT, 272),
    "chunk_bytes": (Code.V1_CHUNK_BYTES, 4096),
    "dtype": (Code.V1_DTYPE, 8),
    "has_ledger": (Code.V1_NO_LEDGER, 0),
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_layout_is_refused_by_its_own_name(tmp_path, field):
    code, value = OTHERS[field]
    assert code_of(tmp_path, blob(2, **{field: value})) == code
    assert code_of(tmp_path, blob(2, **{field: 0xFFFFFFFF})) == code


def test_what_it_does_not_say_must_still_fit(tmp_path):
    """Layers and head_dim are not in the file; the bytes of a chunk and of a head give them away."""
    assert code_of(tmp_path, blob(2), Geometry(2, 2, 4, "float16", 64)) == Code.V1_CHUNK_BYTES
    assert code_of(tmp_path, blob(2), Geometry(1, 2, 8, "float16", 64)) == Code.V1_K_SEGMENT
    assert code_of(tmp_path, blob(2), Geometry(1, 2, 4, "bfloat16", 64)) == Code.V1_DTYPE


@pytest.mark.parametrize("chunks", [0, (1 << 24) + 1, 1 << 31, 0xFFFFFFFF])
def test_counts_without_end(tmp_path, chunks):
    assert code_of(tmp_path, blob(2, chunks=chunks)) == Code.V1_COUNT


def test_a_chunk_of_no_bytes(tmp_path):
    assert code_of(tmp_path, header(1 << 24, chunk_bytes=0)) == Code.V1_CHUNK_BYTES


def test_every_truncation(tmp_path):
    data = blob(1)
    for size in range(0, len(data), 13):
        assert code_of(tmp_path, data[:size]) == (Code.V1_HEADER_SHORT if size < 40 else Code.V1_TRUNCATED)
    assert code_of(tmp_path, data[:-1]) == Code.V1_TRUNCATED


@pytest.mark.parametrize("tail", [b"\0", bytes(8), b"x" * 3000])
def test_bytes_after_the_ledger(tmp_path, tail):
    assert code_of(tmp_path, blob(2) + tail) == Code.V1_TRAILING_BYTES


def test_other_magics(tmp_path):
    assert code_of(tmp_path, blob(2, magic=0x4B56464C41534830)) == Code.V1_MAGIC, "the layout before the ledger"
    assert code_of(tmp_path, blob(2, order=">")) == Code.V1_BYTE_ORDER
    assert code_of(tmp_path, b"no snapshot at all") == Code.V1_MAGIC
    making.written(tmp_path / "v2")
    assert code_of(tmp_path, (tmp_path / "v2").read_bytes()) == Code.V1_MAGIC


@pytest.mark.parametrize("entry", [(2, 0.0), (255, 0.0), (1, float("nan")), (0, float("inf"))])
def test_a_ledger_that_is_none(tmp_path, entry):
    entries = [struct.pack("<B3xf", 1, 0.0), struct.pack("<B3xf", *entry)]
    assert code_of(tmp_path, blob(2, entries=entries)) == Code.V1_LEDGER


def test_every_byte_of_the_header_counts(tmp_path):
    """All but the count of chunks contradict the geometry; that one contradicts the length of the file."""
    data = blob(2)
    for at in range(40):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            code_of(tmp_path, bytes(bad))


def test_a_file_that_is_not_there(tmp_path):
    with refused(StorageError, "storage.cannot-read", tmp_path / "none", "No such file"):
        read_published(tmp_path / "none", GEOMETRY)


def test_a_file_that_shrinks_under_its_reader(tmp_path):
    found = opened(tmp_path, blob(3))
    (tmp_path / "v1").write_bytes(blob(3)[:3000])
    with pytest.raises(SnapshotRefused) as caught:
        list(found.chunks())
    assert caught.value.codes == (Code.V1_TRUNCATED,)

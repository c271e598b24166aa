"""Damaged and forged files: all refused, each kind for its own reason, and nothing allocated by what they promise."""

from __future__ import annotations

import os
import random
import resource
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvlab.codecs.stream.seal import Seal
from kvlab.core.errors import SnapshotRefused, StorageError
from kvlab.core.recipe import canonical
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.format import SnapshotHeader
from kvlab.kvstore.snapshot.reasons import Code
from kvlab.kvstore.snapshot.write import save
from kvstore.snapshot import making
from kvstore.snapshot.forging import Parts
from kvstore.snapshot.making import CHUNKS, GEOMETRY
from refusals import refused

ROOM = 256 << 10  # bytes of memory that Python and pydantic need to say no, whatever the file


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "s"
    making.written(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def parts(good) -> Parts:
    return Parts.of(good)


@pytest.fixture
def refusal(tmp_path):
    """The one code for which a file with these bytes is refused, when opened or at the latest when loaded."""

    def of(data: bytes) -> str:
        (tmp_path / "bad").write_bytes(data)
        tracemalloc.start()
        try:
            with pytest.raises(SnapshotRefused) as caught, read.open(tmp_path / "bad") as snapshot:
                snapshot.load()
            assert tracemalloc.get_traced_memory()[1] < len(data) + ROOM
        finally:
            tracemalloc.stop()
        (code,) = caught.value.codes
        assert str(caught.value).count("\n") == 0 and str(tmp_path / "bad") in str(caught.value)
        return code

    return of


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def test_what_is_not_touched_is_right(good, parts):
    assert parts.sealed() == good


def test_every_bit_of_every_byte_of_the_header(good, refusal):
    found = [refusal(flipped(good, bit)) for bit in range(8 * SnapshotHeader.SIZE)]
    assert set(found[: 8 * 8]) == {Code.NOT_A_SNAPSHOT}
    assert set(found[8 * 8 : 8 * 10]) == {Code.UNKNOWN_VERSION}
    assert set(found[8 * 10 :]) == {Code.HEADER_CHECKSUM}


@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_every_byte_of_the_header_overwritten(good, refusal, value):
    for at in range(SnapshotHeader.SIZE):
        if good[at] != value:
            refusal(good[:at] + bytes([value]) + good[at + 1 :])


def test_every_bit_of_what_follows_the_header(good, refusal):
    header = SnapshotHeader.read(good)
    codes = (Code.MANIFEST_CHECKSUM, Code.INDEX_CHECKSUM, Code.TOKENS_CHECKSUM)
    chance = random.Random(0)
    for span, code in zip(header.spans, codes, strict=True):
        for bit in chance.sample(range(8 * span.start, 8 * span.stop), 40):
            assert refusal(flipped(good, bit)) == code
    for bit in range(8 * header.digest_at, 8 * len(good), 7):
        assert refusal(flipped(good, bit)) == Code.FILE_HASH


@pytest.mark.nightly
def test_a_thousand_bits_of_the_payload(good, tmp_path):
    header, chance = SnapshotHeader.read(good), random.Random(1)
    for bit in chance.sample(range(8 * header.payload_at, 8 * header.digest_at), 1000):
        (tmp_path / "bad").write_bytes(flipped(good, bit))
        damaged, had = (bit // 8 - header.payload_at) // GEOMETRY.chunk_bytes, []
        with read.open(tmp_path / "bad") as snapshot, pytest.raises(SnapshotRefused) as caught:
            had.extend(snapshot.chunks())
        assert caught.value.codes == (Code.CHUNK_CHECKSUM,) and f"chunk {damaged} " in str(caught.value)
        assert making.same(had, making.chunks(damaged)), "those before it were right"


def test_fifty_truncations(good, refusal):
    header = SnapshotHeader.read(good)
    for size in (
        *range(0, SnapshotHeader.SIZE, 4),
        *random.Random(2).sample(range(SnapshotHeader.SIZE, len(good)), 40),
        len(good) - 1,
    ):
        expected = Code.HEADER_SHORT if size < SnapshotHeader.SIZE else Code.TRUNCATED
        assert refusal(good[:size]) == expected
    for size in (header.payload_at, header.digest_at, SnapshotHeader.SIZE):
        assert refusal(good[:size]) == Code.TRUNCATED


@pytest.mark.parametrize("tail", [b"\0", b"\n", bytes(Seal.SIZE), b"x" * 5000])
def test_appended_bytes(good, refusal, tail):
    assert refusal(good + tail) == Code.TRAILING_BYTES


def test_a_whole_snapshot_appended(good, refusal):
    assert refusal(good + good) == Code.TRAILING_BYTES


def test_bytes_put_in_between(good, refusal):
    at = SnapshotHeader.read(good).payload_at + 10
    assert refusal(good[:at] + b"\0" + good[at:]) == Code.TRAILING_BYTES
    assert refusal(good[:at] + good[at + 1 :]) == Code.TRUNCATED


def test_two_chunks_in_each_others_place(good, parts, refusal):
    size = GEOMETRY.chunk_bytes
    swapped = parts.payload[size : 2 * size] + parts.payload[:size] + parts.payload[2 * size :]
    assert refusal(replace(parts, payload=swapped).sealed()) == Code.CHUNK_CHECKSUM


def test_a_change_whose_own_digest_is_right_is_found_by_that_of_the_whole(good, parts, refusal):
    forged = replace(parts, payload=flipped(parts.payload, 100)).digested().sealed()
    assert refusal(forged[: -Seal.SIZE] + good[-Seal.SIZE :]) == Code.FILE_HASH


# -- forgeries: all checksums are right


COUNTS = {
    "chunks": [0, (1 << 24) + 1, 1 << 31, (1 << 32) - 1],
    "chunk_tokens": [0, (1 << 16) + 1, (1 << 32) - 1],
    "manifest_bytes": [0, (1 << 20) + 1, (1 << 32) - 1],
    "size": [0, SnapshotHeader.SIZE - 1, SnapshotHeader.SIZE + 1, 65535],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in COUNTS.items() for value in values])
def test_impossible_counts(parts, refusal, name, value):
    assert refusal(parts.counting(**{name: value}).sealed()) == Code.HEADER_COUNTS


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": 1 << 24},
        {"chunks": CHUNKS + 1},
        {"chunk_tokens": 1 << 16},
        {"manifest_bytes": 1 << 20},
        {"payload_bytes": (1 << 64) - 1},
        {"payload_bytes": 1 << 40},
    ],
)
def test_promises_that_the_file_does_not_keep(parts, refusal, changes):
    assert refusal(parts.counting(**changes).sealed()) == Code.TRUNCATED


@pytest.mark.parametrize("version", [0, 1, 2, 4, 65535])
def test_other_versions(parts, refusal, version):
    assert refusal(parts.counting(version=version).sealed()) == Code.UNKNOWN_VERSION


MANIFESTS = {
    "no json": lambda m: b"{",
    "nothing": lambda m: b"null",
    "no text": lambda m: b"\xff\xfe",
    "brackets without end": lambda m: b"[" * 100_000,
    "a number without end": lambda m: b'{"length": ' + b"9" * 5000 + b"}",
    "not canonical": lambda m: b" " + canonical(m).encode(),
    "a key twice": lambda m: canonical(m).encode()[:-1] + b',"length":24}',
    "an unknown key": lambda m: canonical(m | {"surprise": 1}).encode(),
    "a key missing": lambda m: canonical({k: v for k, v in m.items() if k != "length"}).encode(),
    "another type": lambda m: canonical(m | {"length": "24"}).encode(),
    "no tokens": lambda m: canonical(m | {"length": 0}).encode(),
    "evidence without an id": lambda m: canonical(m | {"evidence": ["yes"]}).encode(),
    "an unknown dtype": lambda m: canonical(geometry(m, dtype="int4")).encode(),
    "no heads": lambda m: canonical(geometry(m, kv_heads=0)).encode(),
    "half a head": lambda m: canonical(geometry(m, kv_heads=0.5)).encode(),
    "an unknown size": lambda m: canonical(geometry(m, size=3)).encode(),
    "no rope": lambda m: canonical(m | {"identity": m["identity"] | {"rope": {}}}).encode(),
}


def geometry(manifest: dict, **changes) -> dict:
    own = manifest["identity"]
    return manifest | {"identity": own | {"geometry": own["geometry"] | changes}}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_are_none(parts, refusal, name):
    forged = replace(parts, said=MANIFESTS[name](parts.manifest))
    assert refusal(forged.sealed()) == Code.MANIFEST_INVALID


RECORDS = [
    {"flags": 4},
    {"flags": 1 << 31},
    {"score": float("nan"), "flags": 2},
    {"score": float("inf"), "flags": 2},
    {"score": 1.0, "flags": 1},
    {"last_use": 41},
    {"last_use": (1 << 64) - 1},
]


@pytest.mark.parametrize("changes", RECORDS)
def test_records_that_no_pager_has(parts, refusal, changes):
    assert refusal(parts.indexed(2, **changes).sealed()) == Code.INDEX_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 20},
        {"identity__geometry__chunk_tokens": 2},
        {"identity__geometry__chunk_tokens": 1 << 40},
        {"identity__geometry__head_dim": 1 << 40},
        {"identity__geometry__layers": 4},
        {"identity__geometry__dtype": "float16"},
    ],
)
def test_a_manifest_of_another_snapshot(parts, refusal, changes):
    assert refusal(parts.saying(**changes).sealed()) == Code.INCONSISTENT


def test_chunks_of_other_lengths(parts, refusal):
    size = GEOMETRY.chunk_bytes
    assert refusal(parts.indexed(0, nbytes=size + 8).indexed(1, nbytes=size - 8).sealed()) == Code.INCONSISTENT
    assert refusal(parts.indexed(0, nbytes=1 << 40).sealed()) == Code.INCONSISTENT
    assert refusal(parts.counting(chunks=3, chunk_tokens=8).sealed()) in (Code.TRUNCATED, Code.TRAILING_BYTES)


def test_tokens_that_are_not_those_of_the_chain(parts, refusal):
    other = replace(parts, ids=flipped(parts.ids, 8 * 4 * 9))
    assert refusal(other.sealed()) == Code.CHAIN_BROKEN
    assert refusal(parts.indexed(5, link=bytes(32)).sealed()) == Code.CHAIN_BROKEN
    assert refusal(parts.saying(identity__salt="another").sealed()) == Code.CHAIN_BROKEN


def test_the_published_layout_is_named(refusal, good):
    assert refusal(b"1HSALFVK" + good[8:]) == Code.PUBLISHED_LAYOUT


# -- what was refused has done nothing


def test_nothing_is_allocated_for_two_thousand_million_chunks(parts, tmp_path):
    """In a process that may take 64 MiB more than it has."""
    paths = []
    for name, chunks in (("2^31", 1 << 31), ("2^24", 1 << 24)):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(parts.counting(chunks=chunks, chunk_tokens=1 << 16).sealed())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
            codes = []
            for path in paths:
                try:
                    read.open(path)
                except SnapshotRefused as error:
                    codes += error.codes
            status = 0 if codes == [Code.HEADER_COUNTS, Code.TRUNCATED] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


PROMISES = [
    {"chunks": 1 << 31},
    {"chunks": 1 << 24, "chunk_tokens": 1 << 16},
    {"manifest_bytes": 1 << 20},
    {"payload_bytes": 1 << 62},
    {"chunk_tokens": 1},
]


@pytest.mark.parametrize("changes", PROMISES)
def test_no_refusal_takes_as_much_memory_as_the_file_has(tmp_path, changes):
    geometry = Geometry(layers=4, kv_heads=4, head_dim=64, dtype="float32", chunk_tokens=64)
    save(tmp_path / "s", making.source(2 * 64, geometry, making.gaussian))
    data = Parts.of((tmp_path / "s").read_bytes()).counting(**changes).sealed()
    (tmp_path / "s").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(SnapshotRefused):
        read.open(tmp_path / "s")
    assert tracemalloc.get_traced_memory()[1] < len(data)
    tracemalloc.stop()


def test_sizes_are_checked_before_anything_is_read(parts, tmp_path, monkeypatch):
    sizes, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: sizes.append(size) or pread(file, size, at))
    (tmp_path / "bad").write_bytes(parts.counting(chunks=1 << 24).sealed())
    with pytest.raises(SnapshotRefused):
        read.open(tmp_path / "bad")
    assert sizes == [SnapshotHeader.SIZE]


def test_who_has_the_last_chunk_has_an_undamaged_file(good, tmp_path):
    """Even a consumer that counts its chunks and never asks the iterator for one more."""
    (tmp_path / "bad").write_bytes(flipped(good, 8 * (SnapshotHeader.read(good).digest_at - 1)))
    before = CHUNKS - 1
    with read.open(tmp_path / "bad") as snapshot:
        had = []
        with pytest.raises(SnapshotRefused):
            upto = before * GEOMETRY.chunk_tokens
            had.extend(chunk for _, chunk in zip(range(before), snapshot.chunks(upto), strict=False))
        stream = snapshot.chunks(upto)
        for _ in range(before - 1):
            next(stream)
        with pytest.raises(SnapshotRefused):
            next(stream)


def test_damage_after_a_prefix(good, tmp_path):
    header = SnapshotHeader.read(good)
    (tmp_path / "bad").write_bytes(flipped(good, 8 * (header.digest_at - 1)))
    with read.open(tmp_path / "bad") as snapshot:
        assert making.same(snapshot.chunks(8, whole=False), making.chunks(2))
        with refused(SnapshotRefused, None, "chunk 5") as caught:
            list(snapshot.chunks(8))
    assert caught.value.codes == (Code.CHUNK_CHECKSUM,)


def test_every_damage_is_named(good, tmp_path):
    header, bad = SnapshotHeader.read(good), good
    for chunk in (1, 4):
        bad = flipped(bad, 8 * (header.payload_at + chunk * GEOMETRY.chunk_bytes))
    (tmp_path / "bad").write_bytes(bad)
    with read.open(tmp_path / "bad") as snapshot:
        found = snapshot.verify()
    assert [code for code, _ in found] == [Code.CHUNK_CHECKSUM, Code.CHUNK_CHECKSUM]
    assert "chunk 1 " in found[0].message and "chunk 4 " in found[1].message


def test_a_file_that_shrinks_under_its_reader(good, tmp_path):
    (tmp_path / "bad").write_bytes(good)
    with read.open(tmp_path / "bad") as snapshot:
        os.truncate(tmp_path / "bad", len(good) // 2)
        with pytest.raises(SnapshotRefused) as caught:
            snapshot.load()
    assert caught.value.codes == (Code.TRUNCATED,)


def test_a_disk_that_fails_is_no_damage(good, tmp_path, monkeypatch):
    (tmp_path / "s").write_bytes(good)

    def failing(*_):
        raise OSError(5, "Input/output error")

    with read.open(tmp_path / "s") as snapshot:
        monkeypatch.setattr(os, "pread", failing)
        with refused(StorageError, "storage.cannot-read", tmp_path / "s", "Input/output error"):
            snapshot.load()


def test_a_refused_snapshot_leaves_no_open_file(good, tmp_path):
    (tmp_path / "bad").write_bytes(good[:-1])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(SnapshotRefused):
            read.open(tmp_path / "bad")
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_a_load_is_the_payload_and_one_chunk(tmp_path):
    geometry = Geometry(layers=4, kv_heads=4, head_dim=64, dtype="float32", chunk_tokens=64)  # 512 KiB a chunk
    save(tmp_path / "s", making.source(16 * 64, geometry, making.gaussian))
    with read.open(tmp_path / "s") as snapshot:
        tracemalloc.start()
        for payload in snapshot.chunks():
            assert payload.shape == torch.Size(geometry.chunk_shape)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 5 * geometry.chunk_bytes

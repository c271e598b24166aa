"""What is saved comes back bit for bit, for every length; equal content is equal bytes."""

from __future__ import annotations

import hashlib
import json
import struct
import weakref

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import LayoutMismatch, StorageError, UserError
from kvlab.core.records import versions
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import ChunkEntry, Ledger
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.chain import links
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.snapshot import making
from kvstore.snapshot.making import CHUNKS, GEOMETRY
from refusals import refused
from tiers import examples

SIZE = GEOMETRY.chunk_tokens
LENGTH = CHUNKS * SIZE

geometries = st.builds(
    Geometry,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 6),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    chunk_tokens=st.integers(1, 5),
)
scores = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def contexts(draw):
    """A geometry, tokens that may not fill their last chunk, payloads and a ledger of the whole chunks."""
    geometry = draw(geometries)
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=geometry.chunk_tokens, max_size=24))
    count = len(tokens) // geometry.chunk_tokens
    clock = draw(st.integers(0, 2**63))
    entries = st.builds(ChunkEntry, st.booleans(), scores, st.integers(0, clock))
    ledger = Ledger(tuple(draw(st.lists(entries, min_size=count, max_size=count))), clock)
    return geometry, tokens, tuple(making.chunk(n, geometry) for n in range(count)), ledger


@given(contexts(), st.data())
@examples(60)
def test_any_context_comes_back_upto_the_chunk_that_its_tokens_fill(folder, context, data):
    geometry, tokens, payloads, ledger = context
    upto = data.draw(st.integers(geometry.chunk_tokens, len(tokens)) | st.none())
    source = SnapshotSource(making.identity(geometry), iter(payloads), ledger, tokens)
    saved = save(folder / "any", source, upto=upto)
    count = (len(tokens) if upto is None else upto) // geometry.chunk_tokens
    with read.open(folder / "any") as snapshot:
        assert snapshot.length == saved.manifest.length == geometry.floor(len(tokens) if upto is None else upto)
        assert making.same(snapshot.chunks(), payloads[:count])
        assert list(snapshot.tokens) == tokens[: snapshot.length]
        assert snapshot.ledger == ledger.upto(count)
        assert snapshot.chain == links(tokens, geometry.chunk_tokens)[:count]
        assert (snapshot.nbytes, snapshot.digest) == (saved.nbytes, saved.digest)
        assert saved.payload_bytes == count * geometry.chunk_bytes
        assert snapshot.verify() == []
        assert snapshot.manifest == saved.manifest


@pytest.mark.parametrize("upto", range(LENGTH + 1))
def test_every_length_is_cut_to_its_last_whole_chunk_or_refused(tmp_path, upto):
    context = making.source(LENGTH)
    if upto < SIZE:
        with refused(UserError, "user.too-few-tokens", upto, SIZE):
            save(tmp_path / "s", context, upto=upto)
        assert list(tmp_path.iterdir()) == []
        return
    assert save(tmp_path / "s", context, upto=upto).manifest.length == upto // SIZE * SIZE
    with read.open(tmp_path / "s") as snapshot:
        assert making.same(snapshot.load(), making.chunks(upto // SIZE))


@pytest.mark.parametrize("upto", range(LENGTH + 1))
@pytest.mark.parametrize("whole", [True, False])
def test_every_prefix_is_read(folder, upto, whole):
    making.written(folder / "prefix")
    with read.open(folder / "prefix") as snapshot:
        assert making.same(snapshot.chunks(upto, whole=whole), making.chunks(upto // SIZE))


def test_what_was_read_is_written_again_as_the_same_bytes(tmp_path):
    making.written(tmp_path / "one", made={"engine": "hf"})
    with read.open(tmp_path / "one") as snapshot:
        again = SnapshotSource(snapshot.manifest.identity, snapshot.chunks(), snapshot.ledger, snapshot.tokens)
        save(tmp_path / "two", again, made={"engine": "hf"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_prefix_of_a_snapshot_is_the_snapshot_of_the_prefix(tmp_path):
    making.written(tmp_path / "short", chunks=3)
    save(tmp_path / "cut", making.source(LENGTH), upto=3 * SIZE)
    short, cut = ((tmp_path / name).read_bytes() for name in ("short", "cut"))
    assert short == cut


def test_the_file_is_laid_out_as_documented(tmp_path):
    """Read by nothing but the description in `format`."""
    saved = making.written(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    header = struct.Struct("<8sHHIIIQIIII")
    magic, version, size, said, chunks, per_chunk, payload, *crcs = header.unpack_from(data)
    assert (magic, version, size) == (b"KVLABSNP", 3, header.size) and header.size == 48
    assert (chunks, per_chunk, payload) == (CHUNKS, SIZE, CHUNKS * GEOMETRY.chunk_bytes)
    at = [size, size + said, size + said + 92 * chunks, size + said + 92 * chunks + 4 * chunks * per_chunk]
    sections = [data[at[n] : at[n + 1]] for n in range(3)]
    assert crcs == [*map(google_crc32c.value, sections), google_crc32c.value(data[: size - 4])]
    manifest = json.loads(sections[0])
    assert manifest["length"] == LENGTH and manifest["clock"] == 40 and manifest["identity"]["codec"] is None
    assert list(struct.unpack(f"<{LENGTH}I", sections[2])) == making.tokens(LENGTH)
    parent, where = hashlib.sha256(b"kvlab token chain 2\n").digest(), at[3]
    identity = json.dumps(manifest["identity"], sort_keys=True, separators=(",", ":"))
    named = b"\0kvlab snapshot chunk 3\n" + hashlib.sha256(identity.encode()).digest()
    for number, record in enumerate(struct.iter_unpack("<32s32sQQdI", sections[1])):
        link, digest, nbytes, last_use, score, flags = record
        parent = hashlib.sha256(parent + sections[2][4 * SIZE * number :][: 4 * SIZE]).digest()
        entry = making.ledger(CHUNKS).entries[number]
        assert (link, last_use) == (parent, entry.last_use)
        assert digest == hashlib.sha256(named + parent + data[where : where + nbytes]).digest()
        assert (flags, score) == (entry.resident + 2 * (entry.score is not None), entry.score or 0.0)
        assert data[where : where + nbytes] == making.chunk(number).numpy().tobytes()
        where += nbytes
    assert where == at[3] + payload == len(data) - 68
    root, signature, crc = struct.unpack("<32s32sI", data[where:])
    assert root == hashlib.sha256(b"\0" + data[: at[3]]).digest() and signature == bytes(32)
    assert crc == google_crc32c.value(root + signature)
    assert saved.nbytes == len(data) and saved.digest == root.hex()


def test_a_snapshot_says_who_made_it_and_not_when(tmp_path):
    made = making.written(tmp_path / "s", made={"engine": "hf", "attention": "sdpa"}).manifest.made
    assert made == versions() | {"engine": "hf", "attention": "sdpa"}


def test_a_context_of_another_salt_is_another_chain(tmp_path):
    save(tmp_path / "plain", making.source(LENGTH))
    save(tmp_path / "salted", making.source(LENGTH, salt="tenant"))
    with read.open(tmp_path / "plain") as plain, read.open(tmp_path / "salted") as salted:
        assert plain.chain[0] != salted.chain[0]
        assert plain.usable_prefix(making.tokens(LENGTH)) == salted.usable_prefix(making.tokens(LENGTH)) == LENGTH


# -- little memory


def test_one_chunk_is_alive_at_a_time(tmp_path):
    alive, most = [], 0

    def payloads():
        nonlocal most
        for number in range(CHUNKS):
            most = max(most, sum(made() is not None for made in alive))
            payload = making.chunk(number)
            alive.append(weakref.ref(payload))
            yield payload
            del payload

    save(tmp_path / "s", SnapshotSource(making.identity(), payloads(), making.ledger(CHUNKS), making.tokens(LENGTH)))
    assert most <= 2, "the one before may still be on its way out"


def test_a_reader_gets_memory_of_its_own(tmp_path):
    making.written(tmp_path / "s")
    with read.open(tmp_path / "s") as snapshot:
        first = next(snapshot.chunks())
        first.zero_()
        assert making.same(snapshot.load(), making.chunks(CHUNKS))


def test_an_open_snapshot_stays_what_it_was(tmp_path):
    making.written(tmp_path / "s")
    with read.open(tmp_path / "s") as old:
        making.written(tmp_path / "s", chunks=2)
        with read.open(tmp_path / "s") as new:
            assert (old.length, new.length) == (LENGTH, 2 * SIZE)
            assert making.same(old.load(), making.chunks(CHUNKS))
            assert making.same(new.load(), making.chunks(2))


def test_two_readers_of_one_snapshot_do_not_disturb_each_other(tmp_path):
    making.written(tmp_path / "s")
    with read.open(tmp_path / "s") as snapshot:
        pairs = list(zip(snapshot.chunks(), snapshot.chunks(), strict=True))
        assert making.same([a for a, _ in pairs], making.chunks(CHUNKS))
        assert making.same([b for _, b in pairs], making.chunks(CHUNKS))


# -- what is not written


def not_written(tmp_path, code, *data, error=UserError, **changes):
    context = vars(making.source(LENGTH)) | {k: v for k, v in changes.items() if k not in ("upto", "evidence")}
    with refused(error, code, *data):
        save(
            tmp_path / "s", SnapshotSource(**context), **{k: v for k, v in changes.items() if k in ("upto", "evidence")}
        )
    assert list(tmp_path.iterdir()) == []


def test_a_hole_is_not_filled_with_zeros(tmp_path):
    chunks = making.chunks(CHUNKS)
    not_written(tmp_path, "user.unwritten-chunk", "chunk 3", 6, payloads=[*chunks[:3], None, *chunks[4:]])


def test_chunks_that_do_not_come_are_missed(tmp_path):
    not_written(tmp_path, "user.unwritten-chunk", "chunk 5", 6, payloads=making.chunks(5))


def test_chunks_after_the_boundary_are_not_asked_for(tmp_path):
    def payloads():
        yield from making.chunks(2)
        raise AssertionError("the third chunk is not saved")

    save(
        tmp_path / "s",
        SnapshotSource(making.identity(), payloads(), making.ledger(9), making.tokens(LENGTH)),
        upto=2 * SIZE + 1,
    )
    with read.open(tmp_path / "s") as snapshot:
        assert len(snapshot.ledger) == 2


def test_more_tokens_than_there_are(tmp_path):
    not_written(tmp_path, "user.too-many-tokens", 25, LENGTH, upto=25)
    not_written(tmp_path, "user.too-many-tokens", -1, upto=-1)


@pytest.mark.parametrize("token", [-1, 2**32, 0.5, "a", None])
def test_what_is_no_token(tmp_path, token):
    not_written(tmp_path, "user.no-such-token", 4294967295, tokens=[token] * LENGTH)


@pytest.mark.parametrize(
    "payload, code, given",
    [
        (making.chunk(0).half(), "layout.chunk", "float16"),
        (making.chunk(0)[:1], "layout.chunk", list(making.chunk(0)[:1].shape)),
        (making.chunk(0).transpose(2, 3), "layout.chunk", list(making.chunk(0).transpose(2, 3).shape)),
        (making.chunk(0)[..., :4], "layout.chunk", list(making.chunk(0)[..., :4].shape)),
        (torch.zeros(GEOMETRY.chunk_shape, device="meta"), "layout.memory", "meta"),
    ],
)
def test_a_payload_of_another_layout(tmp_path, payload, code, given):
    not_written(tmp_path, code, given, error=LayoutMismatch, payloads=[payload] * CHUNKS)


def test_evidence_has_an_id(tmp_path):
    not_written(tmp_path, "user.manifest", "evidence", evidence=["trust me"])


def test_a_folder_is_no_snapshot(tmp_path):
    with refused(StorageError, "storage.no-file", tmp_path):
        read.open(tmp_path)
    with refused(StorageError, "storage.cannot-read", tmp_path / "none", "No such file"):
        read.open(tmp_path / "none")


def test_more_than_there_is_cannot_be_read(tmp_path):
    making.written(tmp_path / "s")
    with read.open(tmp_path / "s") as snapshot:
        for upto in (-1, LENGTH + 1):
            with refused(UserError, "user.too-many-tokens", upto, LENGTH):
                snapshot.chunks(upto)

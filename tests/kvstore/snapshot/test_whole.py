"""A snapshot is one whole: parts of two sound ones do not make a third, and a signature says who made it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.codecs.stream.seal import Key, Seal
from kvlab.core.errors import SnapshotRefused
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.format import SnapshotHeader
from kvlab.kvstore.snapshot.reasons import Code
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.snapshot import making
from kvstore.snapshot.forging import Parts
from kvstore.snapshot.making import CHUNKS, GEOMETRY

SIZE = GEOMETRY.chunk_tokens
LENGTH = CHUNKS * SIZE
KEY, OTHER = Key(b"a shared secret of enough bytes" * 2), Key(b"o" * 32)


def context(seed: int, tokens: list[int] | None = None, **changes) -> SnapshotSource:
    """Contexts of equal shape, whose payloads differ."""
    payloads = (making.chunk(100 * seed + number) for number in range(CHUNKS))
    tokens = making.tokens(LENGTH) if tokens is None else tokens
    return SnapshotSource(making.identity(**changes), payloads, making.ledger(CHUNKS), tokens)


def taken(path, source: SnapshotSource, key: Key | None = None) -> Parts:
    save(path, source, key=key)
    return Parts.of(path.read_bytes())


def refusal(path, data: bytes, key: Key | None = None) -> str:
    path.write_bytes(data)
    with pytest.raises(SnapshotRefused) as caught, read.open(path, key) as snapshot:
        snapshot.load()
    (code,) = caught.value.codes
    assert "\n" not in str(caught.value)
    return code


@pytest.fixture
def two(tmp_path) -> tuple[Parts, Parts]:
    """Two contexts of one model, of as many tokens, which are not the same."""
    other = [token + 1 for token in making.tokens(LENGTH)]
    return taken(tmp_path / "0", context(0)), taken(tmp_path / "1", context(1, other))


def digests_of(parts: Parts, other: Parts) -> Parts:
    """With the digests of another's chunks in the index."""
    with_theirs, width = parts, len(parts.index) // CHUNKS
    for number in range(CHUNKS):
        record = other.index[number * width : (number + 1) * width]
        with_theirs = with_theirs.indexed(number, digest=record[32:64])
    return with_theirs


def test_a_payload_of_another_snapshot_is_refused_whatever_checksums_are_made_anew(two, tmp_path):
    ours, theirs = two
    mixed, seal = replace(ours, payload=theirs.payload), (tmp_path / "0").read_bytes()[-Seal.SIZE :]
    assert refusal(tmp_path / "mixed", mixed.sealed()) == Code.CHUNK_CHECKSUM
    with_digests = digests_of(mixed, theirs)
    assert refusal(tmp_path / "mixed", with_digests.sealed()[: -Seal.SIZE] + seal) == Code.FILE_HASH
    # also where the digest of the whole is made anew: those of the chunks name the tokens that they are of
    assert refusal(tmp_path / "mixed", with_digests.sealed()) == Code.CHUNK_CHECKSUM


@pytest.mark.parametrize(
    "changes", [{"model_hash": "f" * 16}, {"config_hash": "f" * 12}, {"rope": {"rope_theta": 5.0}}], ids=str
)
def test_a_payload_of_the_same_tokens_of_another_model_is_refused(tmp_path, changes):
    ours, theirs = taken(tmp_path / "0", context(0)), taken(tmp_path / "1", context(1, **changes))
    mixed = digests_of(replace(ours, payload=theirs.payload), theirs)
    assert refusal(tmp_path / "mixed", mixed.sealed()) == Code.CHUNK_CHECKSUM


def test_one_chunk_of_another_snapshot_is_refused_and_those_before_it_are_read(two, tmp_path):
    ours, theirs = two
    size, number = GEOMETRY.chunk_bytes, 3
    place = slice(number * size, (number + 1) * size)
    payload = ours.payload[: place.start] + theirs.payload[place] + ours.payload[place.stop :]
    (tmp_path / "mixed").write_bytes(replace(ours, payload=payload).sealed())
    with read.open(tmp_path / "mixed") as snapshot:
        assert making.same(snapshot.chunks(number * SIZE, whole=False), making.chunks(number))
        assert [code for code, _ in snapshot.verify()] == [Code.CHUNK_CHECKSUM]


def test_equal_chunks_at_two_places_have_two_digests(tmp_path):
    payloads = [making.chunk(0)] * CHUNKS
    save(tmp_path / "s", SnapshotSource(making.identity(), payloads, making.ledger(CHUNKS), [5] * LENGTH))
    with read.open(tmp_path / "s") as snapshot:
        assert len({record.digest for record in snapshot.records}) == CHUNKS
        assert len({snapshot.stored(number) for number in range(CHUNKS)}) == 1


def test_manifest_index_and_tokens_of_another_snapshot_are_refused(two, tmp_path):
    ours, theirs = two
    seal = (tmp_path / "0").read_bytes()[-Seal.SIZE :]
    for part in ("index", "ids"):
        mixed = replace(ours, **{part: getattr(theirs, part)}).sealed()
        assert refusal(tmp_path / "mixed", mixed) == Code.CHAIN_BROKEN
        assert refusal(tmp_path / "mixed", mixed[: -Seal.SIZE] + seal) == Code.FILE_HASH
    said = ours.saying(identity__model_hash="f" * 16).sealed()
    assert refusal(tmp_path / "mixed", said) == Code.CHUNK_CHECKSUM
    assert refusal(tmp_path / "mixed", said[: -Seal.SIZE] + seal) == Code.FILE_HASH


def test_who_forges_every_digest_has_a_file_of_another_digest(two, tmp_path):
    """That is all that a digest without a key can say."""
    ours, theirs = two
    (tmp_path / "forged").write_bytes(replace(ours, payload=theirs.payload).digested().sealed())
    with read.open(tmp_path / "0") as one, read.open(tmp_path / "forged") as forged:
        assert forged.verify() == [] and forged.digest != one.digest


# -- signed


def test_the_key_decides(tmp_path):
    plain, signed = taken(tmp_path / "plain", context(0)), taken(tmp_path / "signed", context(0), KEY)
    assert plain == signed
    with read.open(tmp_path / "signed", KEY) as snapshot, read.open(tmp_path / "plain") as other:
        assert snapshot.seal.signed and not other.seal.signed and snapshot.digest == other.digest
        assert snapshot.verify() == [] and making.same(snapshot.load(), other.load())
    with read.open(tmp_path / "signed") as snapshot:
        assert snapshot.verify() == [], "who asks for no key is told nothing of it"
    assert refusal(tmp_path / "x", (tmp_path / "signed").read_bytes(), OTHER) == Code.SIGNATURE
    assert refusal(tmp_path / "x", (tmp_path / "plain").read_bytes(), KEY) == Code.UNSIGNED


def test_what_is_tampered_with_is_refused_whatever_is_made_anew(two, tmp_path):
    ours, theirs = two
    good = taken(tmp_path / "good", context(0), KEY).sealed(KEY)
    assert good == (tmp_path / "good").read_bytes()
    forged = replace(ours, payload=theirs.payload).digested()
    signature = Seal.unpack(good[-Seal.SIZE :]).signature
    root = Seal.unpack(forged.sealed()[-Seal.SIZE :]).root
    front = forged.sealed()[: -Seal.SIZE]
    assert refusal(tmp_path / "x", forged.sealed(), KEY) == Code.UNSIGNED
    assert refusal(tmp_path / "x", forged.sealed(OTHER), KEY) == Code.SIGNATURE
    assert refusal(tmp_path / "x", front + Seal(root, signature).pack(), KEY) == Code.SIGNATURE
    assert refusal(tmp_path / "x", front + Seal(root, KEY.signature(b"kvlab coded cache 2\n", root)).pack(), KEY) == (
        Code.SIGNATURE
    ), "a signature of another kind of file"
    for part in (ours.saying(clock=41), ours.indexed(1, last_use=3)):
        assert refusal(tmp_path / "x", part.sealed()[: -Seal.SIZE] + good[-Seal.SIZE :], KEY) == Code.FILE_HASH
    payload = replace(ours, payload=theirs.payload).sealed(KEY)
    assert payload[SnapshotHeader.read(good).digest_at :] == good[-Seal.SIZE :]
    assert refusal(tmp_path / "x", payload, KEY) == Code.CHUNK_CHECKSUM, "what is signed names every chunk"

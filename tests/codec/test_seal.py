"""One digest over parts in their order, and who vouches for it."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from kvlab.codecs.stream import tree
from kvlab.codecs.stream.seal import UNSIGNED, Key, Seal
from kvlab.core.errors import StorageError, StreamError, UserError
from refusals import refused

# Inputs and roots of the Certificate Transparency project's own tests of RFC 6962.
INPUTS = ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
ROOTS = (
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)


def test_roots_are_those_of_rfc_6962():
    leaves = [tree.leaf(bytes.fromhex(text)) for text in INPUTS]
    assert [tree.root(leaves[: n + 1]).hex() for n in range(len(leaves))] == list(ROOTS)


def test_a_part_in_pieces_is_the_part():
    assert tree.leaf(b"ab", b"", b"c") == tree.leaf(b"abc") == hashlib.sha256(b"\0abc").digest()


def test_order_number_and_content_of_the_parts_make_the_root():
    a, b, c = (tree.leaf(bytes([n])) for n in range(3))
    sequences = [[a], [b], [a, b], [b, a], [a, a], [a, b, c], [a, c, b], [c, b, a], [a, b, c, c]]
    assert len({tree.root(leaves) for leaves in sequences}) == len(sequences)
    assert tree.leaf(a + b) != tree.root([a, b]), "what stands inside a tree is no part"


def test_every_bit_of_a_seal_counts():
    data = Seal.of(tree.leaf(b"x"), b"purpose", Key(bytes(32))).pack()
    assert len(data) == Seal.SIZE and Seal.unpack(data).pack() == data
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StreamError):
            Seal.unpack(bytes(broken))
    for size in (0, 4, len(data) - 1, len(data) + 1):
        with pytest.raises(StreamError):
            Seal.unpack((data + b"x")[:size])


def test_a_signature_is_the_documented_one_and_is_of_one_root_purpose_and_key():
    key, root = Key(b"k" * 40), tree.leaf(b"x")
    seal = Seal.of(root, b"purpose", key)
    assert seal.signature == hmac.new(b"k" * 40, b"purpose" + root, hashlib.sha256).digest()
    assert seal.signed and seal.signed_by(key, b"purpose")
    assert not seal.signed_by(key, b"another") and not seal.signed_by(Key(b"l" * 40), b"purpose")
    assert not Seal(tree.leaf(b"y"), seal.signature).signed_by(key, b"purpose")
    plain = Seal.of(root, b"purpose", None)
    assert plain.signature == UNSIGNED and not plain.signed and not plain.signed_by(key, b"purpose")


def test_a_key_is_a_file_of_some_bytes_and_is_never_shown(tmp_path):
    for size in (32, 33, 4096):
        (tmp_path / "key").write_bytes(bytes(range(256)) * 16 if size == 4096 else b"s" * size)
        assert len(Key.read(tmp_path / "key").secret) == size
    assert "s" * 32 not in repr(Key(b"s" * 32))
    for size, held in ((0, "0 bytes"), (31, "31 bytes"), (4097, "more than 4096 bytes")):
        (tmp_path / "key").write_bytes(b"s" * size)
        with refused(UserError, "user.not-a-key", tmp_path / "key", held, "32 to 4096"):
            Key.read(tmp_path / "key")
    for path in (tmp_path / "none", tmp_path):
        with refused(StorageError, "storage.unreadable", path):
            Key.read(path)
    with refused(UserError, "user.not-a-key", "32 to 4096", 3):
        Key(b"abc")

"""The growing tree is that of RFC 6962, and its proofs prove what they say and nothing else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.stream import tree as sealed
from kvlab.codecs.stream.tree import leaf
from kvlab.core.errors import UserError
from kvlab_mechanisms.ledger.merkle import EMPTY, Tree, proves_consistency, proves_inclusion
from refusals import refused

pytestmark = pytest.mark.full

# Inputs, roots and proofs of the Certificate Transparency project's own tests of RFC 6962.
INPUTS = ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}
INCLUSION = {  # (entry, counted from 1; size)
    (1, 1): (),
    (1, 8): ("96a296d224f2", "5f083f0a1a33", "6b47aaf29ee3"),
    (6, 8): ("bc1a0643b12e", "ca854ea128ed", "d37ee418976d"),
    (3, 3): ("fac54203e7cc",),
    (2, 5): ("6e340b9cffb3", "5f083f0a1a33", "bc1a0643b12e"),
}
CONSISTENCY = {
    (1, 1): (),
    (1, 8): ("96a296d224f2", "5f083f0a1a33", "6b47aaf29ee3"),
    (6, 8): ("0ebc5d3437fb", "ca854ea128ed", "d37ee418976d"),
    (2, 5): ("5f083f0a1a33", "bc1a0643b12e"),
}
LEAVES = [leaf(bytes.fromhex(text)) for text in INPUTS]
SIZES = st.integers(1, 70).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))


def grown(size: int) -> Tree:
    return Tree(leaf(str(n).encode()) for n in range(size))


def test_vectors_of_rfc_6962():
    whole = Tree(LEAVES)
    for size, root in ROOTS.items():
        assert whole.root(size).hex() == Tree(LEAVES[:size]).root().hex() == root
    for (entry, size), path in INCLUSION.items():
        found = whole.inclusion(entry - 1, size)
        assert tuple(one.hex()[:12] for one in found) == path
        assert proves_inclusion(LEAVES[entry - 1], entry - 1, size, whole.root(size), found)
    for (old, size), path in CONSISTENCY.items():
        found = whole.consistency(old, size)
        assert tuple(one.hex()[:12] for one in found) == path
        assert proves_consistency(old, whole.root(old), size, whole.root(size), found)
    assert hashlib.sha256().digest() == EMPTY


@given(SIZES)
def test_the_tree_of_every_size_is_that_of_sealed_caches(drawn):
    size, cut = drawn
    tree = grown(size)
    leaves = [leaf(str(n).encode()) for n in range(size)]
    assert tree.root() == sealed.root(leaves)
    assert tree.root(cut + 1) == sealed.root(leaves[: cut + 1]), "a tree knows what it was"


@given(SIZES, st.data())
def test_inclusion_is_proved_of_this_leaf_at_this_place_alone(drawn, data):
    size, index = drawn
    tree = grown(size)
    one, path, root = leaf(str(index).encode()), tree.inclusion(index), tree.root()
    assert len(path) <= (size - 1).bit_length()
    assert proves_inclusion(one, index, size, root, path)
    assert not proves_inclusion(leaf(b"another"), index, size, root, path)
    elsewhere = data.draw(st.integers(-1, size + 1))
    assert elsewhere == index or not proves_inclusion(one, elsewhere, size, root, path)
    for wrong in mutated(path, data):
        assert not proves_inclusion(one, index, size, root, wrong)


@given(SIZES, st.data())
def test_consistency_is_proved_of_these_two_logs_alone(drawn, data):
    size, old = drawn
    tree = grown(size)
    before, after, path = tree.root(old), tree.root(), tree.consistency(old)
    assert proves_consistency(old, before, size, after, path)
    assert not proves_consistency(old, leaf(b"another"), size, after, path)
    assert not proves_consistency(old, before, size, leaf(b"another"), path) or old == 0
    for wrong in mutated(path, data):
        assert not proves_consistency(old, before, size, after, wrong)


def mutated(path: list[bytes], data) -> list[list[bytes]]:
    """A path with a step too many, one too few, one other, and two swapped."""
    found = [[*path, leaf(b"more")]]
    if path:
        at = data.draw(st.integers(0, len(path) - 1))
        found += [path[:at] + path[at + 1 :], [*path[:at], leaf(b"other"), *path[at + 1 :]]]
    return found + ([[path[1], path[0], *path[2:]]] if len(path) > 1 else [])


def test_what_is_not_in_the_log_has_no_proof():
    tree = grown(5)
    for wrong in (lambda: tree.inclusion(5), lambda: tree.inclusion(-1), lambda: tree.inclusion(3, 3)):
        with refused(UserError, "user.no-entry"):
            wrong()
    with refused(UserError, "user.log-size", 5, 6):
        tree.root(6)
    with refused(UserError, "user.no-beginning", 3, 4):
        tree.consistency(4, 3)

"""One digest over parts in their order: the hash tree of RFC 6962, section 2.1, with SHA-256.

    leaf := SHA-256(0x00 || part)
    node := SHA-256(0x01 || left || right)

A leaf and a node begin differently, so that no part can pass for the inside of a tree. Who knows the leaves checks one
part against the root without the other parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LEAF, NODE = b"\0", b"\1"
SIZE = hashlib.sha256().digest_size  # bytes of a digest


def leaf(*data: bytes | memoryview) -> bytes:
    """The digest of a part, which may be given in pieces, 32 bytes."""
    state = hashlib.sha256(LEAF)
    for piece in data:
        state.update(piece)
    return state.digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The digest of all parts in their order, 32 bytes, from the `leaf` of each; there is at least one.

    The left half of a tree is as large a power of two as leaves a part of them over (RFC 6962, section 2.1).
    """
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(NODE + root(leaves[:left]) + root(leaves[left:])).digest()

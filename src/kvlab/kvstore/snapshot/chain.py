"""A hash chain over the tokens of a context, chunk by chunk.

A chunk's link is SHA-256(link of the chunk before || token ids, u32 little-endian). Equal links therefore mean
equal tokens from the very first on, and the longest prefix that two contexts share is as long as their links agree.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from kvlab.core.errors import UserError

DOMAIN = b"kvlab token chain 2\n"
TOKEN = "I"  # C unsigned int


def root(salt: str = "") -> bytes:
    """What the first link hangs on; contexts under different salts share nothing."""
    return hashlib.sha256(DOMAIN + salt.encode()).digest()


def links(tokens: Sequence[int], chunk_tokens: int, salt: str = "") -> tuple[bytes, ...]:
    """The links of all whole chunks; tokens after the last whole one count for nothing.

    Parameters
    ----------
    tokens : sequence of int
        Ids, each in 0 .. 2**32 - 1.
    chunk_tokens : int
        Tokens of a chunk.
    salt : str
        Keeps contexts apart whose tokens are equal and whose K and V are not, or must not be shared.
    """
    whole = len(tokens) // chunk_tokens * chunk_tokens
    data, width = token_bytes(tokens[:whole]), chunk_tokens * array(TOKEN).itemsize
    found, parent = [], root(salt)
    for at in range(0, len(data), width):
        parent = hashlib.sha256(parent + data[at : at + width]).digest()
        found.append(parent)
    return tuple(found)


def shared(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """How many chunks two chains have in common from the first on."""
    count = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            break
        count += 1
    return count


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as u32, little-endian; `UserError` when one is no such number."""
    try:
        return _little(array(TOKEN, tokens)).tobytes()
    except (OverflowError, TypeError) as error:
        raise UserError(
            f"token ids are whole numbers from 0 to {2**32 - 1}: {error}", code="user.no-such-token"
        ) from None


def read_tokens(data: bytes | memoryview) -> array:
    """The inverse of `token_bytes`."""
    tokens = array(TOKEN)
    tokens.frombytes(data)
    return _little(tokens)


def _little(tokens: array) -> array:
    """Between this machine's byte order and the file's."""
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens

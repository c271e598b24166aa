"""The last bytes of a coded cache and of a snapshot: one digest of the whole, and who vouches for it.

    seal := 32 bytes root, 32 bytes signature, u32 crc

The crc is CRC-32C of what stands before it in the seal, little-endian. The signature is HMAC-SHA-256 (RFC 2104) of the
root, under the name of the format, or zeros.

Three promises, of which none stands for another. A crc says that no accident has changed these bytes. The root says
that all parts of a file are those of one file that was written once; whoever can write files can write another root. A
signature says that whoever made the file holds the key. The key is a shared secret: who can check a signature can also
make one.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import google_crc32c

from kvlab.codecs.stream import tree
from kvlab.core.errors import StorageError, StreamError, UserError

PARTS = struct.Struct(f"<{tree.SIZE}s{tree.SIZE}s")
U32 = struct.Struct("<I")
UNSIGNED = bytes(tree.SIZE)
LEAST_KEY, MOST_KEY = 32, 4096  # bytes; RFC 2104, section 3: no less than a digest has


@dataclass(frozen=True)
class Key:
    """A shared secret.

    Parameters
    ----------
    secret : bytes
        At least 32 bytes; `UserError` when there are fewer.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self):
        if not LEAST_KEY <= len(self.secret) <= MOST_KEY:
            raise UserError(f"a key has {LEAST_KEY} to {MOST_KEY} bytes, this one has {len(self.secret)}")

    @classmethod
    def read(cls, path: Path | str) -> Key:
        """The bytes of a file, all of them, as a key.

        Raises
        ------
        StorageError
            When it cannot be read.
        UserError
            When it is too short or too long for a key.
        """
        try:
            with open(path, "rb") as file:
                secret = file.read(MOST_KEY + 1)
        except OSError as error:
            raise StorageError(f"cannot read the key {path}: {error.strerror}") from None
        if not LEAST_KEY <= len(secret) <= MOST_KEY:
            held = f"{len(secret)} bytes" if len(secret) <= MOST_KEY else f"more than {MOST_KEY} bytes"
            raise UserError(
                f"{path} is no key: it holds {held}, allowed are {LEAST_KEY} to {MOST_KEY};"
                f" `openssl rand -out NAME {LEAST_KEY}` makes one"
            )
        return cls(secret)

    def signature(self, purpose: bytes, root: bytes) -> bytes:
        """HMAC-SHA-256 of a root, 32 bytes; a signature for one purpose is none for another."""
        return hmac.digest(self.secret, purpose + root, "sha256")


@dataclass(frozen=True)
class Seal:
    """The digest of the whole, and a signature of it.

    Parameters
    ----------
    root : bytes
        Of the `tree` over the file's parts, 32 bytes.
    signature : bytes
        32 bytes, zeros when nobody has signed.
    """

    root: bytes
    signature: bytes = UNSIGNED

    SIZE: ClassVar[int] = PARTS.size + U32.size

    @classmethod
    def of(cls, root: bytes, purpose: bytes, key: Key | None) -> Seal:
        """A seal, signed where there is a key."""
        return cls(root) if key is None else cls(root, key.signature(purpose, root))

    @property
    def signed(self) -> bool:
        """Whether it bears a signature, right or wrong."""
        return self.signature != UNSIGNED

    def signed_by(self, key: Key, purpose: bytes) -> bool:
        """Whether whoever holds this key has signed."""
        return hmac.compare_digest(self.signature, key.signature(purpose, self.root))

    def refuse_other(self, key: Key | None, purpose: bytes) -> None:
        """`StreamError` where there is a key and it has not signed."""
        if key is not None and not self.signed_by(key, purpose):
            if self.signed:
                raise StreamError("it is signed with another key", code="stream.other-key")
            raise StreamError("it is not signed", code="stream.unsigned")

    def pack(self) -> bytes:
        """The bytes of the seal."""
        raw = PARTS.pack(self.root, self.signature)
        return raw + U32.pack(google_crc32c.value(raw))

    @classmethod
    def unpack(cls, data: bytes) -> Seal:
        """Read `SIZE` bytes back; `StreamError` when their checksum is wrong."""
        raw = data[: PARTS.size]
        if len(data) != cls.SIZE or google_crc32c.value(raw) != U32.unpack_from(data, PARTS.size)[0]:
            raise StreamError("the checksum of its last bytes, which hold the digest of the whole, is wrong")
        return cls(*PARTS.unpack(raw))

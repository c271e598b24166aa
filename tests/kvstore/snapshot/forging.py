"""Snapshots taken apart, changed, and put together with right checksums: a forger's files; and a damaged one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import google_crc32c

from kvlab.codecs.stream import tree
from kvlab.codecs.stream.seal import Key, Seal
from kvlab.core.recipe import canonical
from kvlab.kvstore.snapshot.format import HEADER, MAGIC, PURPOSE, RECORD, U32, VERSION, SnapshotHeader, chunk_digest

FIELDS = ("link", "digest", "nbytes", "last_use", "score", "flags")


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@dataclass(frozen=True)
class Parts:
    """What is between the header and the seal, and what the header counts beside their lengths."""

    said: bytes
    index: bytes
    ids: bytes
    payload: bytes
    counts: dict

    @classmethod
    def of(cls, data: bytes) -> Parts:
        header = SnapshotHeader.read(data[: SnapshotHeader.SIZE])
        sections = [data[span] for span in header.spans]
        return cls(*sections, data[header.payload_at : -Seal.SIZE], {})

    @property
    def manifest(self) -> dict:
        return json.loads(self.said)

    def saying(self, **changes) -> Parts:
        """With other fields of the manifest; a dotted name leads inside, and None for a name's value removes it."""
        manifest = self.manifest
        for name, value in changes.items():
            *way, last = name.split("__")
            inside = manifest
            for step in way:
                inside = inside[step]
            inside[last] = value
        return replace(self, said=canonical(manifest).encode())

    def indexed(self, number: int, **changes) -> Parts:
        """With other fields of one record."""
        at = number * RECORD.size
        fields = dict(zip(FIELDS, RECORD.unpack_from(self.index, at), strict=True)) | changes
        return replace(self, index=self.index[:at] + RECORD.pack(*fields.values()) + self.index[at + RECORD.size :])

    def digested(self) -> Parts:
        """With the right digest of every chunk, for the manifest, the links and the payload that there are now."""
        made, at = self, 0
        identity = hashlib.sha256(canonical(self.manifest["identity"]).encode()).digest()
        for number, (link, _, nbytes, *_) in enumerate(RECORD.iter_unpack(self.index)):
            made = made.indexed(number, digest=chunk_digest(identity, link, self.payload[at : at + nbytes]))
            at += nbytes
        return made

    def counting(self, **counts) -> Parts:
        """With a header that counts otherwise."""
        return replace(self, counts=counts)

    def sealed(self, key: Key | None = None) -> bytes:
        """The file, its root and every crc made anew."""
        fields = {
            "version": VERSION,
            "size": SnapshotHeader.SIZE,
            "manifest_bytes": len(self.said),
            "chunks": len(self.index) // RECORD.size,
            "chunk_tokens": len(self.ids) // U32.size // max(1, len(self.index) // RECORD.size),
            "payload_bytes": len(self.payload),
        } | self.counts
        crcs = map(google_crc32c.value, (self.said, self.index, self.ids))
        raw = HEADER.pack(MAGIC, *fields.values(), *crcs)
        front = raw + U32.pack(google_crc32c.value(raw)) + self.said + self.index + self.ids
        return front + self.payload + Seal.of(tree.leaf(front), PURPOSE, key).pack()

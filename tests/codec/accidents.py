"""What may happen to a stream: accidents, and forgeries whose checksums are right again."""

from __future__ import annotations

import random

import google_crc32c

from kvlab.codec import bitstream
from kvlab.codec.bitstream import HEADER, U32


def damaged(data: bytes, chance: random.Random) -> bytes:
    """One random accident: flipped bits, overwritten bytes, a cut, an insertion, a repetition."""
    kind, out = chance.randrange(5), bytearray(data)
    at = chance.randrange(len(data))
    if kind == 0:
        out[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        for _ in range(chance.randrange(1, 9)):
            out[chance.randrange(len(out))] = chance.randrange(256)
    elif kind == 2:
        out = out[:at]
    elif kind == 3:
        out[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
    else:
        end = min(len(out), at + chance.randrange(1, 40))
        out[at:end] = out[at:end] * 2
    return bytes(out)


def resealed(data: bytes) -> bytes:
    """The same bytes with right checksums wherever the lengths lead: a forger's stream, not a damaged one."""
    data = bytearray(data)
    data[HEADER.size : HEADER.size + 4] = U32.pack(google_crc32c.value(bytes(data[: HEADER.size])))
    try:
        header = bitstream.FrameHeader.read(memoryview(bytes(data)))
        at = header.SIZE
        for number in range(0 if header.shared else 1, min(header.n_blocks, 1000) + 1):
            (length,) = U32.unpack_from(data, at)
            payload = bytes(data[at + 4 : at + 4 + length])
            at += 4 + length
            U32.pack_into(data, at, bitstream._section_crc(header.crc, number, payload))
            at += 4
    except Exception:
        return bytes(data)
    return bytes(data)

"""What may happen to a stream: accidents, and forgeries whose checksums are right again."""

from __future__ import annotations

import random
import struct

import google_crc32c

from kvlab.codecs.stream import bitstream
from kvlab.codecs.stream.bitstream import HEADER, U32
from kvlab.core.errors import StreamError


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


def renamed(data: bytes, chance: random.Random) -> bytes:
    """The same frame under another header: layer, stream, flags or a size is forged, all checksums are right."""
    fields = list(HEADER.unpack_from(data))
    place = chance.randrange(1, len(fields))
    widest = (16, 8, 8, 16, 16, 32, 32)[place - 1]
    small = max(0, fields[place] + chance.choice((-1, 1, 2, -fields[place] // 2, 7)))
    fields[place] = chance.choice((small, 2 * fields[place], chance.randrange(1 << widest), (1 << widest) - 1))
    if place in (2, 3):
        fields[place] = chance.randrange(4)
    return resealed(HEADER.pack(*fields) + data[HEADER.size :])


def resealed(data: bytes) -> bytes:
    """The same bytes with right checksums wherever the lengths lead: a forger's stream, not a damaged one."""
    data = bytearray(data)
    if len(data) < HEADER.size + U32.size:
        return bytes(data)
    U32.pack_into(data, HEADER.size, google_crc32c.value(bytes(data[: HEADER.size])))
    try:
        header = bitstream.FrameHeader.read(memoryview(bytes(data)))
        at = header.SIZE
        for number in range(0 if header.shared else 1, min(header.n_blocks, 1000) + 1):
            (length,) = U32.unpack_from(data, at)
            payload = bytes(data[at + 4 : at + 4 + length])
            at += 4 + length
            U32.pack_into(data, at, bitstream._section_crc(header.crc, number, payload))
            at += 4
    except (StreamError, struct.error):  # no such header, or a length that leads out of the frame
        pass
    return bytes(data)

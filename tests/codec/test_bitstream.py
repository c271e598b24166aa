"""Frames of coded tensors: exact both ways, each block alone, and nothing damaged gets through."""

from __future__ import annotations

import random
import tracemalloc
from math import prod

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.accidents import damaged, resealed
from kvlab.codecs.base import Encoded
from kvlab.codecs.stream import bitstream
from kvlab.codecs.stream.bitstream import DTYPES, HEADER, U32, frame_bytes, read_frame
from kvlab.core.errors import StorageError, StreamError
from refusals import refused
from tiers import examples


def array(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bytes of a dtype, so that NaN patterns and negative zeros are among them."""
    source = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=source)
    return raw.view(dtype).squeeze(-1)


def made(shape=(2, 24, 8), blocks=3, shared=True) -> Encoded:
    first = (array(torch.float16, (5, 8)), array(torch.uint8, (3,))) if shared else ()
    return Encoded(
        shape,
        layer=3,
        stream="v",
        shared=first,
        blocks=tuple(
            (array(torch.uint8, (40 + i,), i), array(torch.float16, (2, 3), i), array(torch.uint16, (i,), i))
            for i in range(blocks)
        ),
    )


def raw(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist()


def same(a: Encoded, b: Encoded) -> bool:
    def plain(e):
        return e.shape, e.layer, e.stream, e.packed, [list(map(raw, part)) for part in (e.shared, *e.blocks)]

    return plain(a) == plain(b)


@pytest.mark.parametrize("shared", [True, False])
def test_a_frame_reads_back_exactly(shared):
    encoded = made(shared=shared)
    assert same(read_frame(frame_bytes(encoded)), encoded)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    seed=st.integers(0, 100),
)
@examples(60)
def test_every_dtype_and_shape_reads_back_exactly(dtype, shape, seed):
    encoded = Encoded((1, 1, 1), 0, "k", shared=(), blocks=((array(dtype, tuple(shape), seed),),))
    assert same(read_frame(frame_bytes(encoded)), encoded)


def test_the_layout_is_the_documented_one():
    encoded = Encoded((2, 300, 8), 5, "v", shared=(), blocks=((torch.tensor([1, 2, 3], dtype=torch.uint8),),))
    data = frame_bytes(encoded)
    assert HEADER.unpack_from(data) == (len(data), 5, 1, 0, 2, 8, 300, 1)
    assert U32.unpack_from(data, HEADER.size)[0] == google_crc32c.value(data[: HEADER.size])
    assert data[24:28] == U32.pack(6)
    assert data[28:34] == bytes([1, 0 | 1 << 4, 3, 1, 2, 3])
    assert len(data) == 24 + 4 + 6 + 4


def test_one_block_is_read_without_the_others():
    encoded, data = made(), bytearray(frame_bytes(made()))
    data[-1] ^= 1  # the checksum of the last block
    alone = read_frame(bytes(data), only=1)
    assert list(map(raw, alone.blocks[1])) == list(map(raw, encoded.blocks[1]))
    assert list(map(raw, alone.shared)) == list(map(raw, encoded.shared))
    assert alone.blocks[0] == alone.blocks[2] == ()
    with refused(StreamError, "stream.checksum", "block 2 of layer 3 v"):
        read_frame(bytes(data))
    with pytest.raises(IndexError):
        read_frame(bytes(data), only=3)


def test_a_block_in_anothers_place_is_found_out():
    twins = tuple((array(torch.uint8, (40,), seed),) for seed in (1, 2))
    data = frame_bytes(Encoded((1, 2, 4), 0, "k", shared=(), blocks=twins))
    start, size = 24, (len(data) - 24) // 2
    swapped = data[:start] + data[start + size :] + data[start : start + size]
    with refused(StreamError, "stream.checksum", "block 0"):
        read_frame(swapped)


def test_what_does_not_fit_is_not_written():
    with refused(StorageError, "storage.array", torch.float64):
        frame_bytes(Encoded((1, 1, 1), 0, "k", shared=(), blocks=((torch.zeros(1, dtype=torch.float64),),)))
    with refused(StorageError, "storage.header", "layer 70000"):
        frame_bytes(Encoded((1, 1, 1), 70000, "k", shared=(), blocks=((torch.zeros(1),),)))


@pytest.mark.parametrize(
    "shape", [(0, 65536, 65536, 65536, 65536), (0, 1 << 34), (1 << 20, 0, 1 << 20), (1 << 16, 1 << 16, 0)]
)
def test_an_empty_array_that_promises_too_much_is_refused_by_reader_and_writer(shape):
    """Torch itself refuses such shapes with a RuntimeError, so the array is forged."""
    dims = b"".join(map(bitstream._varint, shape))
    with refused(StreamError, "stream.empty-array", list(shape)):
        read_frame(sealed(bytes([1, len(shape) << 4]) + dims))
    if prod(max(size, 1) for size in shape) < 1 << 62:
        with refused(StorageError, "storage.empty-array", list(shape)):
            frame_bytes(Encoded((1, 1, 1), 0, "k", shared=(), blocks=((torch.empty(shape, dtype=torch.uint8),),)))


def sealed(payload: bytes) -> bytes:
    """A frame of one block with this payload and right checksums."""
    head = HEADER.pack(HEADER.size + 12 + len(payload), 0, 0, 0, 1, 1, 1, 1)
    crc = google_crc32c.value(head)
    section = bitstream._section_crc(crc, 1, payload)
    return head + U32.pack(crc) + U32.pack(len(payload)) + payload + U32.pack(section)


def test_what_could_not_be_read_back_is_not_written():
    arrays = (torch.zeros(1, dtype=torch.uint8),)
    with refused(StorageError, "storage.too-many-arrays", 256, "0..255"):
        frame_bytes(Encoded((1, 1, 1), 0, "k", shared=(), blocks=(256 * arrays,)))
    with refused(StorageError, "storage.array", "9 dimensions"):
        frame_bytes(Encoded((1, 1, 1), 0, "k", shared=(), blocks=((torch.zeros(9 * [1]),),)))
    for shape, blocks in (((1, 0, 1), (arrays,)), ((0, 1, 1), (arrays,)), ((1, 1, 1), ())):
        with refused(StorageError, "storage.zero-size", list(shape)):
            frame_bytes(Encoded(shape, 0, "k", shared=(), blocks=blocks))


def test_ten_thousand_accidents_are_all_refused():
    encoded = made(shape=(1, 24, 8), blocks=2)
    data = frame_bytes(encoded)
    chance = random.Random(0)
    for _ in range(10_000):
        broken = damaged(data, chance)
        try:
            assert same(read_frame(broken), encoded)
        except StreamError:
            assert broken != data


def test_forged_frames_are_refused_or_read_within_their_size():
    """Right checksums over wrong lengths, dtypes and dimensions: typed errors, and no memory by promise."""
    data = frame_bytes(made())
    chance, read = random.Random(1), 0
    tracemalloc.start()
    for _ in range(2_000):
        forged = resealed(damaged(data, chance))
        try:
            encoded = read_frame(forged)
        except StreamError:
            continue
        read += 1
        arrays = [*encoded.shared, *(a for block in encoded.blocks for a in block)]
        assert sum(a.numel() * a.element_size() for a in arrays) <= len(forged)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert read > 100, "or nothing was forged"

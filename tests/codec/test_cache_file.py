"""A whole cache as a file: complete, counted to the byte, and decodable piece by piece."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from functools import partial

import google_crc32c
import pytest
import torch

from kvlab.base.errors import StorageError, StreamError, UserError
from kvlab.base.recipe import IntStream
from kvlab.codec.base import Encoded, Site
from kvlab.codec.ladder.int_groups import IntCodec
from kvlab.codec.stream.bitstream import U32
from kvlab.codec.stream.cache_file import HEADER, CacheCodec, CacheHeader, CacheReader, CacheWriter

HEADS, TOKENS, DIM = 2, 40, 16


def header(**changes) -> CacheHeader:
    fields = {
        "layers": 3,
        "heads": HEADS,
        "head_dim": DIM,
        "tokens": TOKENS,
        "dtype": "bfloat16",
        "recipe_id": "0123456789ab",
        "calibration_hash": None,
        "model_hash": "fedcba9876543210",
    }
    return CacheHeader(**fields | changes)


def codecs(**changes) -> CacheCodec:
    make = partial(IntCodec, IntStream(bits=4, block_size=16))
    fields = {"recipe_id": "0123456789ab", "calibration_hash": None, "k": make, "v": make, "layers": frozenset({1})}
    return CacheCodec(**fields | changes)


def tensor(layer: int, stream: str, tokens: int = TOKENS) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * layer + (stream == "v"))
    return torch.randn(HEADS, tokens, DIM, generator=source).bfloat16()


def written(path, head: CacheHeader | None = None, codec: CacheCodec | None = None) -> int:
    head, codec = head or header(), codec or codecs()
    with open(path, "wb") as file:
        writer = CacheWriter(file, head)
        for layer, stream in head.frames:
            x = tensor(layer, stream, head.tokens)
            writer.add(codec.of(layer, stream).encode(x, Site(0, layer, stream)))
        writer.close()
    return writer.nbytes


def test_a_cache_comes_back_and_its_bytes_are_the_file(tmp_path):
    path, codec = tmp_path / "cache.kvls", codecs()
    nbytes = written(path)
    reader = CacheReader(path)
    assert reader.header == header()
    assert path.stat().st_size == nbytes == reader.nbytes
    assert reader.bits_per_value == 8 * nbytes / (2 * 3 * HEADS * TOKENS * DIM)
    for layer, stream in reader.header.frames:
        x = tensor(layer, stream)
        direct = codec.of(layer, stream)
        expected = direct.decode(direct.encode(x, Site(0, layer, stream)))
        assert torch.equal(codec.decode(reader, layer, stream), expected)
        assert torch.equal(expected, x.float()) == (layer != 1), "layers that are left alone are stored exactly"


def test_any_block_is_decoded_alone(tmp_path):
    written(tmp_path / "cache.kvls")
    reader, codec = CacheReader(tmp_path / "cache.kvls"), codecs()
    whole = codec.decode(reader, 1, "k")
    for index in range(3):
        place, values = codec.decode_block(reader, 1, "k", index)
        assert torch.equal(whole[place], values)


@pytest.mark.parametrize("name", ["recipe_id", "calibration_hash"])
def test_another_recipe_or_calibration_is_refused(tmp_path, name):
    written(tmp_path / "cache.kvls")
    other = codecs(**{name: "ffffffffffff" + "0000" * (name == "calibration_hash")})
    with pytest.raises(StreamError, match=name):
        other.decode(CacheReader(tmp_path / "cache.kvls"), 0, "k")


def test_frames_out_of_order_and_incomplete_caches_are_refused():
    codec, file = codecs(), io.BytesIO()
    writer = CacheWriter(file, header())
    with pytest.raises(StorageError, match="is due"):
        writer.add(codec.of(0, "v").encode(tensor(0, "v"), Site(0, 0, "v")))
    with pytest.raises(StorageError, match="not complete"):
        writer.close()
    with pytest.raises(StorageError, match="does not fit"):
        header(layers=70000).pack()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"recipe_id": "0123456789"}, "recipe_id has 10 digits, it takes 12"),
        ({"model_hash": "0" * 18}, "model_hash has 18 digits, it takes 16"),
        ({"model_hash": ""}, "model_hash has 0 digits"),
        ({"calibration_hash": "ab"}, "calibration_hash has 2 digits"),
        ({"recipe_id": "no recipe id"}, "does not fit"),
        ({"tokens": 0}, "no size may be zero"),
        ({"layers": 0}, "no size may be zero"),
        ({"dtype": "float64"}, "does not fit"),
    ],
)
def test_a_header_that_could_not_be_read_back_is_not_written(changes, message):
    with pytest.raises(StorageError, match=message):
        header(**changes).pack()


@pytest.mark.parametrize("place, width", [(6, 2), (8, 2), (10, 2), (12, 4), (17, 1)])
def test_a_forged_header_is_refused(place, width):
    """Sizes of zero, and a reserved byte that is not; the checksum is right."""
    raw = bytearray(header().pack()[: HEADER.size])
    raw[place : place + width] = bytes([7]) if place == 17 else bytes(width)
    with pytest.raises(StreamError, match="reserved byte 7" if place == 17 else "none of them may be zero"):
        CacheHeader.unpack(bytes(raw) + U32.pack(google_crc32c.value(bytes(raw))))


def test_what_the_file_does_not_hold_is_named_with_what_it_holds(tmp_path):
    written(tmp_path / "cache.kvls")
    reader = CacheReader(tmp_path / "cache.kvls")
    for frame in ((5, "k"), (-1, "v"), (0, "q")):
        with pytest.raises(UserError, match=r"allowed: layers 0\.\.2 of k and v"):
            reader.frame(*frame)
        with pytest.raises(UserError, match=r"allowed: layers 0\.\.2 of k and v"):
            reader.frame_bytes(*frame)
    for block in (3, -1):
        with pytest.raises(UserError, match=r"blocks 0\.\.2"):
            reader.frame(1, "k", block)


def test_only_the_last_layers_codec_is_kept():
    made = []

    def make():
        made.append(IntCodec(IntStream(bits=4)))
        return made[-1]

    codec = codecs(k=make, v=make, layers=frozenset(range(3)))
    assert codec.of(0, "k") is codec.of(0, "k") and len(made) == 1
    assert codec.of(1, "k") is made[1] and codec.of(0, "k") is made[2] and codec.of(0, "v") is made[3]


def test_damage_anywhere_in_the_file_is_refused(tmp_path):
    path = tmp_path / "cache.kvls"
    written(path)
    data, chance = path.read_bytes(), random.Random(2)

    def read_all():
        reader, codec = CacheReader(path), codecs()
        return [codec.decode(reader, *frame) for frame in reader.header.frames]

    for number in range(300):
        broken = bytearray(data)
        if number % 3 == 0:
            broken = broken[: chance.randrange(len(data))]
        elif number % 3 == 1:
            broken[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            broken += bytes(chance.randrange(1, 9))
        path.write_bytes(broken)
        with pytest.raises(StreamError):
            read_all()


MEASURE = """
import re, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from functools import partial
from kvlab.codec.base import Site, StreamCalibration
from kvlab.codec.stream.cache_file import CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codec.klt.components import Components
from kvlab.codec.ladder.int_groups import IntCodec
from kvlab.codec.klt.codec import KltCodec
from kvlab.codec.klt.marginal import gaussian_sketch
from kvlab.base.recipe import IntStream, KltStream

heads, dim = 4, 64
x = torch.randn(heads, 2048, dim)
turn = torch.linalg.qr(torch.randn(heads, dim, dim)).Q
sketch = gaussian_sketch(dim).float().expand(heads, -1, -1)
plain = Components(torch.zeros(heads, dim), turn, turn, turn.mT, torch.ones(heads, dim), sketch)
calibration = StreamCalibration(components={layer: plain for layer in range(12)})
make = {"int": partial(IntCodec, IntStream(bits=4)), "klt": partial(KltCodec, KltStream(bits=4), calibration)}
for layers in (2, 2, 12):
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    codecs = CacheCodec("0" * 12, None, make[sys.argv[2]], make[sys.argv[2]], frozenset(range(layers)))
    with open(sys.argv[1], "wb") as file:
        writer = CacheWriter(file, CacheHeader(layers, heads, dim, 2048, "float32", "0" * 12, None, "0" * 16))
        for layer, stream in writer.header.frames:
            writer.add(codecs.of(layer, stream).encode(x, Site(0, layer, stream)))
        writer.close()
    reader = CacheReader(sys.argv[1])
    for frame in reader.header.frames:
        codecs.decode(reader, *frame)
    # not ru_maxrss, which a process takes over from the one that started it
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.mark.parametrize("name", ["int", "klt"])
def test_memory_does_not_grow_with_layers(tmp_path, name):
    """Peak memory of coding and decoding 12 layers, once 2 layers are warm: one layer's K is 2 MiB."""
    run = [sys.executable, "-c", MEASURE, str(tmp_path / "cache.kvls"), name]
    # What is freed goes back at once: otherwise the allocator's own habits decide, and they differ from run to run.
    habits = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=os.environ | habits)
    _, few, many = map(int, done.stdout.split())
    assert many - few <= 8


def test_a_frame_of_noise_is_no_cache():
    writer = CacheWriter(io.BytesIO(), header())
    noise = Encoded((HEADS, TOKENS, DIM), 0, "k", shared=(), blocks=((torch.zeros(1),),), packed=False)
    with pytest.raises(StorageError):
        writer.add(noise)

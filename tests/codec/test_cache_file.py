"""A whole cache as a file: complete, counted to the byte, and decodable piece by piece."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial

import google_crc32c
import pytest
import torch

from kvlab.codecs.base import Encoded, Site
from kvlab.codecs.int import IntStream
from kvlab.codecs.int.codec import IntCodec
from kvlab.codecs.stream import tree
from kvlab.codecs.stream.bitstream import U32, frame_bytes, read_frame
from kvlab.codecs.stream.cache_file import HEADER, PURPOSE, CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codecs.stream.seal import Key, Seal
from kvlab.core.errors import StorageError, StreamError, UserError
from refusals import refused

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


def tensor(layer: int, stream: str, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * seed + 10 * layer + (stream == "v"))
    return torch.randn(HEADS, TOKENS, DIM, generator=source).bfloat16()


def written(path, seed: int = 0, key: Key | None = None) -> int:
    head, codec = header(), codecs()
    with open(path, "wb") as file:
        writer = CacheWriter(file, head, key)
        for layer, stream in head.frames:
            x = tensor(layer, stream, seed)
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
    frames = sum(reader.frame_bytes(*frame) for frame in reader.header.frames)
    assert nbytes == CacheHeader.overhead(3) + frames and CacheHeader.overhead(3) == 44 + 6 * 32 + 68
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
    with refused(StreamError, "stream.other-identity", name):
        other.decode(CacheReader(tmp_path / "cache.kvls"), 0, "k")


def test_frames_out_of_order_and_incomplete_caches_are_refused():
    codec, file = codecs(), io.BytesIO()
    writer = CacheWriter(file, header())
    with refused(StorageError, "storage.out-of-order", (0, "v"), (0, "k")):
        writer.add(codec.of(0, "v").encode(tensor(0, "v"), Site(0, 0, "v")))
    with refused(StorageError, "storage.incomplete", (0, "v")):
        writer.close()
    with refused(StorageError, "storage.header", "layers=70000"):
        header(layers=70000).pack()


@pytest.mark.parametrize(
    ("changes", "code", "data"),
    [
        ({"recipe_id": "0123456789"}, "storage.header", "recipe_id has 10 digits, it takes 12"),
        ({"model_hash": "0" * 18}, "storage.header", "model_hash has 18 digits, it takes 16"),
        ({"model_hash": ""}, "storage.header", "model_hash has 0 digits"),
        ({"calibration_hash": "ab"}, "storage.header", "calibration_hash has 2 digits"),
        ({"recipe_id": "no recipe id"}, "storage.header", "recipe_id='no recipe id'"),
        ({"tokens": 0}, "storage.zero-size", "tokens=0"),
        ({"layers": 0}, "storage.zero-size", "layers=0"),
        ({"dtype": "float64"}, "storage.header", "dtype='float64'"),
    ],
)
def test_a_header_that_could_not_be_read_back_is_not_written(changes, code, data):
    with refused(StorageError, code, data):
        header(**changes).pack()


@pytest.mark.parametrize("place, width", [(6, 2), (8, 2), (10, 2), (12, 4), (17, 1)])
def test_a_forged_header_is_refused(place, width):
    """Sizes of zero, and a reserved byte that is not; the checksum is right."""
    raw = bytearray(header().pack()[: HEADER.size])
    raw[place : place + width] = bytes([7]) if place == 17 else bytes(width)
    expected = ("stream.reserved", "reserved byte 7") if place == 17 else ("stream.zero-size",)
    with refused(StreamError, *expected):
        CacheHeader.unpack(bytes(raw) + U32.pack(google_crc32c.value(bytes(raw))))


def test_what_the_file_does_not_hold_is_named_with_what_it_holds(tmp_path):
    written(tmp_path / "cache.kvls")
    reader = CacheReader(tmp_path / "cache.kvls")
    for frame in ((5, "k"), (-1, "v"), (0, "q")):
        with refused(UserError, "user.no-such-frame", "0..2", "k and v"):
            reader.frame(*frame)
        with refused(UserError, "user.no-such-frame", "0..2", "k and v"):
            reader.frame_bytes(*frame)
    for block in (3, -1):
        with refused(UserError, "user.no-such-block", "0..2"):
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
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.stream.cache_file import CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codecs.shared.components import Components
from kvlab.codecs.int.codec import IntCodec
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.shared.sketch import gaussian_sketch
from kvlab.codecs.int import IntStream
from kvlab.codecs.klt import KltStream

heads, dim = 4, 64
x = torch.randn(heads, 2048, dim)
turn = torch.linalg.qr(torch.randn(1, heads * dim, heads * dim)).Q
sketch = gaussian_sketch(heads * dim).float()[None]
zero = torch.zeros(heads, dim)
plain = Components(zero, zero, turn, turn, turn.mT, torch.ones(1, heads * dim), sketch)
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


@pytest.mark.nightly
def test_memory_does_not_grow_with_layers(tmp_path):
    """Peak memory of coding and decoding 12 layers, once 2 layers are warm: one layer's K is 2 MiB."""
    run = [sys.executable, "-c", MEASURE, str(tmp_path / "cache.kvls"), "klt"]
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


# -- one whole


@dataclass(frozen=True)
class Taken:
    """A file taken apart, to be put together otherwise."""

    head: bytes
    frames: tuple[bytes, ...]
    leaves: tuple[bytes, ...]
    seal: bytes

    @classmethod
    def of(cls, path) -> Taken:
        data, reader, at, frames = path.read_bytes(), CacheReader(path), CacheHeader.SIZE, []
        for frame in reader.header.frames:
            frames.append(data[at : at + reader.frame_bytes(*frame)])
            at += len(frames[-1])
        leaves = (data[place : place + 32] for place in range(at, at + 32 * len(frames), 32))
        return cls(data[: CacheHeader.SIZE], tuple(frames), tuple(leaves), data[-Seal.SIZE :])

    def at(self, number: int, frame: bytes) -> Taken:
        """With another frame in a place."""
        return replace(self, frames=(*self.frames[:number], frame, *self.frames[number + 1 :]))

    def leaved(self) -> Taken:
        """With the leaves of these frames."""
        return replace(self, leaves=tuple(map(tree.leaf, self.frames)))

    def sealed(self, signature: bytes | None = None) -> Taken:
        """With the root of these leaves; what a forger does who knows the format."""
        signature = Seal.unpack(self.seal).signature if signature is None else signature
        return replace(self, seal=Seal(tree.root([tree.leaf(self.head), *self.leaves]), signature).pack())

    def put(self, path):
        path.write_bytes(b"".join([self.head, *self.frames, *self.leaves, self.seal]))
        return path


KEY, OTHER = Key(bytes(range(32))), Key(bytes(range(1, 40)))


@pytest.fixture
def two(tmp_path) -> tuple[Taken, Taken]:
    """Two files of equal shape, recipe and model, each of them sound."""
    for seed in (0, 1):
        written(tmp_path / str(seed), seed)
    return Taken.of(tmp_path / "0"), Taken.of(tmp_path / "1")


def test_what_was_taken_apart_is_the_documented_layout(two, tmp_path):
    for seed, taken in enumerate(two):
        assert taken.put(tmp_path / "again").read_bytes() == (tmp_path / str(seed)).read_bytes()
        assert taken.leaved().sealed() == taken
        assert CacheReader(tmp_path / str(seed)).seal.root == taken.seal[:32]


@pytest.mark.parametrize("number", range(6))
def test_a_frame_of_another_file_is_refused_and_the_others_are_read(two, tmp_path, number):
    ours, theirs = two
    mixed, codec = CacheReader(ours.at(number, theirs.frames[number]).put(tmp_path / "mixed")), codecs()
    for place, frame in enumerate(mixed.header.frames):
        if place == number:
            with refused(StreamError, "stream.part-digest", "mixed", "layer {} {}".format(*frame)):
                codec.decode(mixed, *frame)
        else:
            codec.decode(mixed, *frame)


@pytest.mark.parametrize("number", range(6))
def test_a_frame_and_its_leaf_of_another_file_are_refused_at_once(two, tmp_path, number):
    ours, theirs = two
    path = ours.at(number, theirs.frames[number]).leaved().put(tmp_path / "mixed")
    with refused(StreamError, "stream.root-digest", path):
        CacheReader(path)


@pytest.mark.parametrize("index", range(3))
def test_a_block_of_another_file_is_refused(two, tmp_path, index):
    """All checksums of the mixed frame are right, and it decodes by itself."""
    ours, _ = two
    own, other = (read_frame(taken.frames[2]) for taken in two)
    blocks = (*own.blocks[:index], other.blocks[index], *own.blocks[index + 1 :])
    frame = frame_bytes(replace(own, blocks=blocks))
    assert len(frame) == len(ours.frames[2]) and not torch.equal(
        codecs().of(1, "k").decode(read_frame(frame)), codecs().of(1, "k").decode(own)
    )
    mixed = CacheReader(ours.at(2, frame).put(tmp_path / "mixed"))
    for block in (None, *range(3)):
        with refused(StreamError, "stream.part-digest", "layer 1 k"):
            mixed.frame(1, "k", block)
    with refused(StreamError, "stream.root-digest"):
        CacheReader(ours.at(2, frame).leaved().put(tmp_path / "mixed"))


def test_header_and_trailer_of_another_file_are_refused(two, tmp_path):
    ours, theirs = two
    foreign = replace(ours, head=header(model_hash="0" * 15 + "1").pack())
    with refused(StreamError, "stream.root-digest"):
        CacheReader(foreign.put(tmp_path / "mixed"))
    with refused(StreamError, "stream.root-digest"):
        CacheReader(replace(ours, seal=theirs.seal).put(tmp_path / "mixed"))
    mixed = CacheReader(replace(ours, seal=theirs.seal, leaves=theirs.leaves).put(tmp_path / "mixed"))
    for frame in mixed.header.frames:
        with refused(StreamError, "stream.part-digest", "layer {} {}".format(*frame)):
            mixed.frame(*frame)


def test_a_block_is_read_alone_and_not_unchecked(two, tmp_path):
    """Whatever happens to the other frames, and nothing of its own."""
    ours, _ = two
    broken = replace(ours, frames=tuple(f[:-1] + bytes([f[-1] ^ 1]) for f in ours.frames)).at(2, ours.frames[2])
    reader, codec = CacheReader(broken.put(tmp_path / "broken")), codecs()
    whole = codec.decode(reader, 1, "k")
    for index in range(3):
        place, values = codec.decode_block(reader, 1, "k", index)
        assert torch.equal(whole[place], values)
        with pytest.raises(StreamError):
            codec.decode_block(reader, 1, "v", index)


def test_a_mixture_whose_digest_is_made_anew_is_another_file(two, tmp_path):
    """No digest keeps a forger from making a file of his own; its root is another, and nobody has signed it."""
    ours, theirs = two
    forged = ours.at(3, theirs.frames[3]).leaved().sealed()
    roots = {CacheReader(taken.put(tmp_path / "any")).seal.root for taken in (ours, theirs, forged)}
    assert len(roots) == 3


def test_a_file_of_version_one_is_refused_in_one_line(tmp_path):
    raw = bytearray(header().pack()[: HEADER.size])
    raw[4:6] = b"\1\0"
    (tmp_path / "old").write_bytes(bytes(raw) + U32.pack(google_crc32c.value(bytes(raw))) + bytes(1000))
    with refused(StreamError, "stream.other-version", "version 1", "version 3", "`kvlab encode`"):
        CacheReader(tmp_path / "old")


# -- signed


def test_a_signature_says_who_made_it(two, tmp_path):
    _, theirs = two
    nbytes = written(tmp_path / "signed", key=KEY)
    assert nbytes == (tmp_path / "0").stat().st_size and CacheReader(tmp_path / "signed").seal.signed
    assert CacheReader(tmp_path / "signed", KEY).seal.root == CacheReader(tmp_path / "0").seal.root
    with refused(StreamError, "stream.other-key", tmp_path / "signed"):
        CacheReader(tmp_path / "signed", OTHER)
    with refused(StreamError, "stream.unsigned", tmp_path / "0"):
        CacheReader(tmp_path / "0", KEY)
    signed = Taken.of(tmp_path / "signed")
    forged = signed.at(3, theirs.frames[3]).leaved().sealed()
    CacheReader(forged.put(tmp_path / "forged"))
    with refused(StreamError, "stream.other-key"):
        CacheReader(tmp_path / "forged", KEY)
    stripped = forged.sealed(signature=bytes(32)).put(tmp_path / "stripped")
    with refused(StreamError, "stream.unsigned"):
        CacheReader(stripped, KEY)
    with refused(StreamError, "stream.other-key"):
        root = Seal.unpack(forged.seal).root
        CacheReader(forged.sealed(OTHER.signature(PURPOSE, root)).put(tmp_path / "theirs"), KEY)

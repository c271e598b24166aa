"""A whole cache as a file: complete, counted to the byte, and decodable piece by piece."""

from __future__ import annotations

import io
import random
import subprocess
import sys

import pytest
import torch

from kvlab.codec.base import Encoded, Site
from kvlab.codec.cache_file import CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codec.ladder.int_groups import IntCodec
from kvlab.errors import StorageError, StreamError
from kvlab.recipe import IntStream

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
    codec = IntCodec(IntStream(bits=4, block_size=16))
    fields = {"recipe_id": "0123456789ab", "calibration_hash": None, "k": codec, "v": codec, "layers": frozenset({1})}
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
import resource, sys, torch
torch.set_num_threads(1)
from kvlab.codec.base import Site
from kvlab.codec.cache_file import CacheCodec, CacheHeader, CacheReader, CacheWriter
from kvlab.codec.ladder.int_groups import IntCodec
from kvlab.recipe import IntStream

codec = IntCodec(IntStream(bits=4))
x = torch.randn(4, 4096, 64)
for layers in (2, 2, 12):
    with open(sys.argv[1], "wb") as file:
        writer = CacheWriter(file, CacheHeader(layers, 4, 64, 4096, "float32", "0" * 12, None, "0" * 16))
        for layer, stream in writer.header.frames:
            writer.add(codec.encode(x, Site(0, layer, stream)))
        writer.close()
    reader = CacheReader(sys.argv[1])
    codecs = CacheCodec("0" * 12, None, codec, codec, frozenset(range(layers)))
    for frame in reader.header.frames:
        codecs.decode(reader, *frame)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_layers(tmp_path):
    """Peak memory of coding and decoding 12 layers, once 2 layers are warm: one layer's K is 4 MiB."""
    run = [sys.executable, "-c", MEASURE, str(tmp_path / "cache.kvls")]
    _, few, many = map(int, subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())
    assert many - few <= 8


def test_a_frame_of_noise_is_no_cache():
    writer = CacheWriter(io.BytesIO(), header())
    noise = Encoded((HEADS, TOKENS, DIM), 0, "k", shared=(), blocks=((torch.zeros(1),),), packed=False)
    with pytest.raises(StorageError):
        writer.add(noise)

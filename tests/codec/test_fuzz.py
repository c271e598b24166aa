"""Every codec's streams under accidents and forgeries: refused by type, or decoded to what they were."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from codec import ladder_making, making
from codec.accidents import damaged, renamed, resealed
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import StreamError

pytestmark = pytest.mark.full

CASES = ladder_making.storing()
NAMES = sorted({name for name, _ in CASES})
ACCIDENTS, FORGERIES, HEADERS = 1000, 300, 200  # of each codec: more than ten thousand accidents in all


@cache
def stream(name: str, condition: str = "plain"):
    """A codec, its frame of a ragged tensor of few values, and what that decodes to."""
    codec = ladder_making.codec(name, condition)
    encoded = codec.encode(ladder_making.planted(tokens=40), making.SITE)
    return codec, frame_bytes(encoded), codec.decode(encoded)


@pytest.mark.parametrize("name", NAMES)
def test_accidents_are_refused_or_harmless(name):
    codec, data, decoded = stream(name)
    chance, harmless = random.Random(name), 0
    for _ in range(ACCIDENTS):
        try:
            again = codec.decode(read_frame(damaged(data, chance)))
        except StreamError:
            continue
        assert torch.equal(again, decoded)
        harmless += 1
    assert harmless < ACCIDENTS / 10, "an accident here and there writes the bytes that were there"


@pytest.mark.parametrize("name", NAMES)
def test_forgeries_are_refused_or_decoded_within_their_shape(name):
    codec, data, _ = stream(name)
    chance, read, refused = random.Random(name), 0, 0
    for _ in range(FORGERIES):
        try:
            encoded = read_frame(resealed(damaged(data, chance)))
            read += 1
            assert codec.decode(encoded).shape == encoded.shape
        except StreamError:
            refused += 1
    assert refused > 0
    assert read > FORGERIES / 5, "or the codec has not been tried, the reader alone"


@pytest.mark.parametrize("name, condition", CASES)
def test_forged_headers_are_refused_or_decoded_to_what_they_say(name, condition):
    """Another layer, stream, flag or size than was coded, whole and block by block; the calibration fits none of it."""
    codec, data, _ = stream(name, condition)
    chance, read, refused = random.Random(name), 0, 0
    for _ in range(HEADERS):
        try:
            encoded = read_frame(renamed(data, chance))
        except StreamError:
            continue
        read += 1
        try:
            decoded = codec.decode(encoded)
        except StreamError:
            refused += 1
            with pytest.raises(StreamError):
                for index in range(len(encoded.blocks)):
                    codec.decode_block(encoded, index)
            continue
        assert decoded.shape == encoded.shape
        place, values = codec.decode_block(encoded, 0)
        assert torch.equal(decoded[place], values)
    assert read > HEADERS / 4 and refused > HEADERS / 10


@pytest.mark.parametrize("name, condition", CASES)
def test_no_tokens_are_no_tensor(name, condition):
    codec, data, _ = stream(name, condition)
    encoded = replace(read_frame(data), shape=(2, 0, 64), blocks=())
    with pytest.raises(StreamError):
        codec.decode(encoded)


FORGE = """
import random, resource, sys
import torch
torch.set_num_threads(1)
from codec import ladder_making, making
from codec.accidents import damaged, renamed, resealed
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import StreamError

streams = []
for name in sys.argv[2:]:
    codec = ladder_making.codec(name)
    encoded = codec.encode(ladder_making.planted(tokens=40), making.SITE)
    codec.decode(read_frame(frame_bytes(encoded)))
    streams.append((codec, frame_bytes(encoded)))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]), -1))
chance, read = random.Random(0), 0
for number in range(400):
    codec, data = streams[number % len(streams)]
    try:
        encoded = read_frame(renamed(data, chance) if number % 3 else resealed(damaged(data, chance)))
        read += 1
        codec.decode(encoded)
    except StreamError:
        pass
print(read)
torch.empty(2 * int(sys.argv[1]), dtype=torch.uint8)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is set from what Linux says is in use")
def test_forgeries_allocate_nothing_by_promise():
    """Decoders of frames of a few kilobytes, in a process that may take 64 MiB more than it has."""
    run = [sys.executable, "-c", FORGE, str(64 << 20), *NAMES]
    folder = Path(__file__).parents[1]
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ | paths)
    assert done.stdout and int(done.stdout) > 100, done.stderr
    assert done.returncode and "allocate" in done.stderr.splitlines()[-1], "the limit holds"

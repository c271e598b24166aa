"""Every codec's streams under accidents and forgeries: refused by type, or decoded to what they were."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from codec import ladder_making, making
from codec.accidents import damaged, resealed
from kvlab.codec.bitstream import frame_bytes, read_frame
from kvlab.errors import StreamError

NAMES = sorted(set(ladder_making.RECIPES) - {"noise"})
ACCIDENTS, FORGERIES = 1000, 300  # of each codec: more than ten thousand accidents in all


@cache
def stream(name: str):
    """A codec, its frame of a ragged tensor of few values, and what that decodes to."""
    codec = ladder_making.codec(name)
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
    chance, refused = random.Random(name), 0
    for _ in range(FORGERIES):
        try:
            encoded = read_frame(resealed(damaged(data, chance)))
            assert codec.decode(encoded).shape == encoded.shape
        except StreamError:
            refused += 1
    assert refused > 0

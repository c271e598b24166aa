"""Blocks are joined and cut to what the codec itself would have written."""

from __future__ import annotations

import pytest
import torch

from kvlab.codecs.base import Site
from kvlab.codecs.d4 import D4Stream
from kvlab.codecs.e8 import E8Stream
from kvlab.codecs.fp8 import Fp8Stream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.klt.joining import arrays_of, joiner
from kvlab.codecs.registry import build
from kvlab.core.codec_settings import IdentityStream

SITE = Site(0, 1, "v")
JOINED = [
    IdentityStream(),
    IntStream(bits=4, group=16),
    KiviStream(bits=2, axis="token", group=16),
    HadamardStream(bits=3),
    D4Stream(bits=3),
    E8Stream(bits=2),
]


def tokens(heads, count, head_dim):
    return torch.randn(heads, count, head_dim, generator=torch.Generator().manual_seed(1))


def same(a, b):
    return a.shape == b.shape and all(map(torch.equal, arrays_of(a), arrays_of(b)))


@pytest.mark.parametrize("recipe", JOINED, ids=lambda recipe: recipe.codec)
@pytest.mark.parametrize("heads, head_dim", [(1, 32), (3, 16), (2, 64)])
def test_joined_and_cut_blocks_are_those_that_the_codec_writes(recipe, heads, head_dim):
    codec = build(recipe)
    how = joiner(codec, SITE, heads, head_dim)
    x = tokens(heads, 11, head_dim)
    whole = codec.encode(x, SITE)
    for at in (1, 2, 7, 10):
        first, rest = codec.encode(x[:, :at], SITE), codec.encode(x[:, at:], SITE)
        assert how.fits(first) and how.fits(rest)
        assert same(how.join(first, rest), whole)
        assert how.join(first, rest).stats == whole.stats
        assert same(how.cut(whole, at), first)


def test_codes_that_share_a_byte_or_a_scale_are_not_joined():
    assert joiner(build(IntStream(bits=3, group=4)), SITE, 1, 20) is None  # 60 bits a token
    assert joiner(build(Fp8Stream()), SITE, 2, 32) is None
    assert joiner(build(KiviStream(bits=2, axis="channel")), SITE, 2, 32) is None

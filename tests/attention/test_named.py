"""Mechanisms by name: what is understood, and how a mistake is answered."""

from __future__ import annotations

import pytest

from kvlab.attention.layer_plan import by_length
from kvlab.attention.named import ByLength, Latent, Sparse, mechanism
from kvlab.attention.patterns import BlockSparse, SlidingWindow
from kvlab.core.errors import UnknownName, UserError
from refusals import refused


def test_names_are_understood():
    assert mechanism("window:window=9") == Sparse("window:window=9", SlidingWindow(9))
    assert mechanism("block_sparse:top_k=3,score=bounds").pattern == BlockSparse(top_k=3, score="bounds")
    assert mechanism("latent:rank=64") == Latent("latent:rank=64", rank=64, sinks=4)
    assert mechanism("window").plan(3, 99) == (SlidingWindow(),) * 3
    assert mechanism("by_length:full=64").plan(6, 65) == by_length(6, 65, full=64)
    assert isinstance(mechanism("by_length"), ByLength)


def test_patterns_can_be_read_back_from_their_names():
    for pattern in (SlidingWindow(9), BlockSparse(top_k=0, sinks=0, score="bounds")):
        assert mechanism(pattern.name).pattern == pattern


@pytest.mark.parametrize(
    ("given", "error", "data"),
    [
        ("block-sparse", UnknownName, ("'block-sparse'", "did you mean 'block_sparse'")),
        ("full", UnknownName, ("mechanism 'full'",)),
        ("window:windw=3", UnknownName, ("'windw'", "did you mean 'window'")),
        ("window:window=many", UserError, ("'many'", "a whole number")),
        ("window:window=0", UserError, ("window is 0", "a whole number, 1 or more")),
        ("latent:rank=0", UserError, ("latent:rank=0", "1 or more")),
    ],
)
def test_mistakes_are_answered_in_a_line(given, error, data):
    with refused(error, None, *data):
        mechanism(given)

"""What a filled cache did and holds, against what its calls ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlab.cache.hf.coder import StreamCoder
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CodecNotActive


class CacheCounts(NamedTuple):
    """Times that the codecs encoded, times that they should have, bytes stored and the K and V elements they are of."""

    fires: int
    expected_fires: int
    kv_bytes: int
    kv_values: int


def counts(cache: KVCache, calls: Sequence[int]) -> CacheCounts:
    """What a cache of one sequence did in calls of so many tokens.

    Raises
    ------
    CodecNotActive
        A layer was not coded, coded otherwise than it should have been, or not read.
    """
    fires = expected = values = 0
    for entry in cache.check():
        values += entry.values
        if isinstance(getattr(cache.recipe, entry.stream), IdentityStream):
            continue
        due = expected_fires(cache.layers[entry.layer].coders[entry.stream], calls)
        if entry.fires != due:
            raise CodecNotActive(
                f"the codec of layer {entry.layer} {entry.stream} fired {entry.fires} times in {len(calls)} calls,"
                f" {due} were due",
                code="not-active.fires",
            )
        fires, expected = fires + entry.fires, expected + due
    return CacheCounts(fires, expected, cache.nbytes, values)


def expected_fires(coder: StreamCoder, calls: Sequence[int]) -> int:
    """How often a coder has to encode when calls of so many tokens come, counted without looking at what it did.

    A codec that codes token by token encodes once per call and for each block that the call's tokens begin besides;
    `klt` begins a block with every call of more than a few tokens; any other encodes a block when it is complete.
    """
    length, size, fires = 0, coder.size or sum(calls), 0
    for tokens in calls:
        if coder.loose:
            fires += 1 if tokens < coder.loose else -(-tokens // size)
        elif not coder.codec.per_token:
            fires += (length + tokens) // size - length // size
        elif coder.joiner is None:
            fires += -(-tokens // size)
        else:
            fires += (length + tokens - 1) // size - length // size + 1
        length += tokens
    return fires

"""`archive` as a serde through LMCache's own registry, processor and memory objects."""

from __future__ import annotations

import time

import pytest
import torch

from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CapabilityError
from kvstore import archiving

pytest.importorskip("lmcache", reason="lmcache is not installed")
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor, serialized_layout_desc
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

from kvlab.kvstore.lmcache import ArchiveSerde, ChunkPlace, register

TOKENS, BITS = 64, 6


def memory(x: torch.Tensor) -> TensorMemoryObj:
    raw = x.contiguous().view(torch.uint8).flatten()
    return TensorMemoryObj(raw, MemoryObjMetadata(x.shape, x.dtype, 0, raw.numel(), 1), None)


def key(number: int) -> ObjectKey:
    return ObjectKey(bytes([number]) * 32, "tiny", 0)


def done(ask, task) -> bool:
    until = time.monotonic() + 60
    while (found := ask(task)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def serde(hf_engine, tiny_windows, model):
    archive = archiving.fitted(hf_engine, tiny_windows)
    ids = [7 * n % 311 for n in range(2 * TOKENS)]
    places = {key(n): ChunkPlace(n * TOKENS, ids[n * TOKENS : (n + 1) * TOKENS]) for n in range(2)}
    return ArchiveSerde(archive, named_recipe("archive", bits=BITS), model.turns(256), places.__getitem__)


@pytest.fixture(scope="module")
def processor(serde):
    register("kvlab_archive", serde)
    made = create_serde_processor(SerdeConfig("kvlab_archive", {"max_workers": 2}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def chunks(model, serde):
    """Two chunks of one text as LMCache holds them, [2, layers, tokens, heads * head_dim]."""
    from kvlab.kvstore.hf.run import PagedRun
    from kvlab.kvstore.paging.config import PagerConfig

    run = PagedRun(model, PagerConfig(pool_tokens=512, chunk_tokens=TOKENS))
    run.extend([token for n in range(2) for token in serde.located(key(n)).ids])
    return [run.pager.payload(n).permute(1, 0, 3, 2, 4).flatten(3) for n in range(2)]


@pytest.fixture(scope="module")
def written(processor, chunks):
    """Each chunk as LMCache would store it: its bytes alone, in a buffer of the size that the serde estimates."""
    layout = serialized_layout_desc(MemoryLayoutDesc([chunks[0].shape], [chunks[0].dtype]), processor)
    buffers = [memory(torch.zeros(layout.shapes[0], dtype=layout.dtypes[0])) for _ in chunks]
    task = processor.submit_serialize([memory(x) for x in chunks], buffers, [key(0), key(1)])
    assert done(processor.query_serialize_result, task)
    return [bytes(one.byte_array) for one in buffers]


def read(processor, data: bytes, like: torch.Tensor, number: int) -> torch.Tensor | None:
    """What comes back of a key; None where the serde says that it failed."""
    into = memory(torch.zeros_like(like))
    source = memory(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    task = processor.submit_deserialize([source], [into], [key(number)])
    return into.tensor if done(processor.query_deserialize_result, task) else None


def test_chunks_come_back_in_the_bits_that_were_asked_for(processor, chunks, written):
    for number, (chunk, data) in enumerate(zip(chunks, written, strict=True)):
        assert 0.99 * BITS < 8 * len(data) / chunk.numel() < 1.01 * BITS
        found = read(processor, data, chunk, number)
        assert 0 < float((found - chunk).square().sum() / chunk.square().sum()) < 1e-3


def test_what_is_damaged_or_of_another_key_does_not_come_back(processor, chunks, written):
    assert read(processor, written[0], chunks[0], 1) is None  # other tokens, at another place
    assert read(processor, written[0][:-9], chunks[0], 0) is None
    spoilt = bytearray(written[1])
    spoilt[len(spoilt) // 2] ^= 1
    assert read(processor, bytes(spoilt), chunks[1], 1) is None
    assert read(processor, written[1], chunks[1][:, :1], 1) is None  # fewer layers than the calibration's


def test_only_bits_say_a_size_before_anything_is_written(serde):
    with pytest.raises(CapabilityError):
        ArchiveSerde(serde.archive, named_recipe("archive", quality=700), serde.turns, serde.located)

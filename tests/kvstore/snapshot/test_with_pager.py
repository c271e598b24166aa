"""A pager saved and restored: the same bytes, the same ledger, and nothing of a refused snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import SnapshotRefused
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry, same_bits
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import build
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.format import SnapshotHeader
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore import paging
from kvstore.snapshot import making
from tiers import examples

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=4, dtype="float32", chunk_tokens=4)
CONFIG = PagerConfig(pool_tokens=32, chunk_tokens=4)


def source(pager: Pager) -> SnapshotSource:
    payloads, ledger, _ = paging.saved(pager)
    return SnapshotSource(making.identity(pager.geometry), payloads, ledger, making.tokens(pager.length))


def restored(snapshot: read.Snapshot, pool_tokens: int = 32) -> Pager:
    config = PagerConfig(pool_tokens=pool_tokens, chunk_tokens=4)
    payloads = snapshot.chunks()
    return Pager.restored(
        snapshot.geometry, config, build("lru", snapshot.geometry), payloads, snapshot.ledger, snapshot.length
    )


@given(st.integers(4, 70), st.integers(1, 9))
@examples(30)
def test_what_is_restored_is_saved_again_as_the_same_file(folder, length, step):
    """serialize(deserialize(b)) == b for any schedule, when the pool is as large as before."""
    rows = paging.random_bits(GEOMETRY, length)
    pager = paging.filled(rows, GEOMETRY, CONFIG, step=step)
    save(folder / "one", source(pager))
    with read.open(folder / "one") as snapshot:
        again = restored(snapshot)
        assert again.check() == [] and again.length == GEOMETRY.floor(length)
        assert paging.holds(again, rows)
    save(folder / "two", source(again))
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()


def test_a_smaller_pool_keeps_the_bytes_and_changes_residency_alone(tmp_path):
    rows = paging.random_bits(GEOMETRY, 60)
    save(tmp_path / "large", source(paging.filled(rows, GEOMETRY, PagerConfig(pool_tokens=64, chunk_tokens=4))))
    with read.open(tmp_path / "large") as large:
        save(tmp_path / "small", source(restored(large, pool_tokens=28)))
        with read.open(tmp_path / "small") as small:
            assert making.same(large.chunks(), small.chunks())
            assert large.ledger != small.ledger and len(small.ledger.resident) == 7
            for ours, theirs in zip(large.ledger.entries, small.ledger.entries, strict=True):
                assert (ours.score, ours.last_use) == (theirs.score, theirs.last_use)


@pytest.mark.parametrize("where", ["payload", "last chunk", "digest"])
def test_a_refused_snapshot_changes_nothing_of_a_live_pager(tmp_path, where):
    rows = paging.random_bits(GEOMETRY, 50)
    live = paging.filled(rows, GEOMETRY, CONFIG)
    save(tmp_path / "s", source(live))
    data = bytearray((tmp_path / "s").read_bytes())
    header = SnapshotHeader.read(bytes(data))
    data[{"payload": header.payload_at, "last chunk": header.digest_at - 1, "digest": -1}[where]] ^= 1
    (tmp_path / "s").write_bytes(data)
    before, bits = paging.state(live), live.chunks.pool.data.clone()
    with pytest.raises(SnapshotRefused), read.open(tmp_path / "s") as snapshot:
        live = restored(snapshot)
    assert paging.state(live) == before and same_bits(live.chunks.pool.data, bits)
    assert paging.holds(live, rows)

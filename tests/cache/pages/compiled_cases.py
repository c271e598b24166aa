"""The compiled loop: what it reads is what the codec decodes, and what torch alone reads.

`test_compiled.py` runs these in a process of its own: a process that holds numba cannot start vLLM 0.32 after it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import NamedTuple

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.pages.test_exact import (  # noqa: F401 (they run here with compiled loops)
    loops_elsewhere,
    small_spans,
    test_every_query_reads_each_key_as_its_position_says,
    test_the_dtype_of_the_model_is_kept_and_sums_are_in_float32,
)
from cache.pages.test_rows import DIM, HEADS, SITE, made
from codec import ladder_making
from codec.ladder_making import LAYER, planted
from kvlab.cache.pages import layer
from kvlab.cache.pages.exact import Ring
from kvlab.cache.pages.layer import LayerPages, quick
from kvlab.cache.pages.rope import MeanByPosition, Rotation
from kvlab.cache.pages.step import ServerStep
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.codecs.base import Site
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.reading import Looked
from kvlab.codecs.klt.reading_numba import TileLoop, active_of, way_of
from kvlab.codecs.klt.served_numba import ServedAttention
from kvlab.codecs.klt.tables_numba import StreamTables, tables_of
from kvlab.codecs.klt.vectors_numba import turned_round
from kvlab.codecs.registry import build
from kvlab.codecs.shared import compiled
from kvlab.codecs.shared.lines_numba import add_lines
from kvlab.core.errors import NonFinite, StreamError

BLOCK = 4
AFTER = pytest.mark.nightly  # those loops take long to compile, and tests/cache/test_columns.py has them sooner
CODE = compiled.code  # as it is, whatever a test puts in its place


@pytest.mark.parametrize("heads", [3, 6], ids=["one-group", "two-groups"])
@pytest.mark.parametrize("changes", [{"bits": 4}, {"bits": 2}, {"bits": 0.5}, {"bits": 3, "escape": False}], ids=str)
def test_the_compiled_loop_reads_what_the_codec_decodes(heads, changes):
    """Of rows that lie anywhere in pages, K's or V's bytes first; to the rounding of a sum."""
    codec = build(KltStream(block_size=64, **changes), ladder_making.calibration(heads, DIM))
    rows = rows_of(codec, SITE, heads, DIM)
    x = planted(heads, 700, DIM, 1)
    x[:, ::7] *= 30
    x[1, ::11, 7] += 1e4
    x[:, ::13] = 1e3 * torch.randn(heads, 54, DIM, generator=torch.Generator().manual_seed(1))
    coded, due = rows.encode(x), rows.decode(rows.encode(x))
    pages, slots = torch.full((2000, rows.bytes + 5), 255, dtype=torch.uint8), torch.randperm(2000)[:700]
    pages[slots, 5:] = coded
    own = quick(rows)
    assert isinstance(own.read, TileLoop)
    assert_near(own.tokens(own.read(pages, slots, 5)), due)


def assert_near(found: torch.Tensor, due: torch.Tensor) -> None:
    """Apart by the rounding of sums over all heads of a group."""
    assert (found - due).abs().max() <= 5e-6 * due.abs().max()


@given(st.binary(min_size=700, max_size=700), st.sampled_from([2, 4]))
def test_rows_that_no_encoder_wrote_are_read_alike_or_refused_alike(data, bits):
    rows = rows_of(made("klt", bits), SITE, HEADS, DIM)
    count = len(data) // rows.bytes
    forged = torch.frombuffer(bytearray(data[: count * rows.bytes]), dtype=torch.uint8).view(count, rows.bytes)
    own = quick(rows)
    for row in forged.split(1):
        try:
            due = rows.decode(row)
        except StreamError:
            with pytest.raises(StreamError):
                own.read(row, torch.zeros(1, dtype=torch.int64), 0)
            continue
        if due.isfinite().all():
            assert_near(own.tokens(own.read(row, torch.zeros(1, dtype=torch.int64), 0)), due)


def test_where_nothing_can_be_kept_on_disk_it_is_compiled_all_the_same(monkeypatch):
    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    monkeypatch.setattr(compiled, "njit", njit)
    monkeypatch.setattr(further, "__qualname__", "further")
    assert compiled.compiled(further) == ("compiled", further)


class Before(NamedTuple):
    """A class that an upgrade renames."""

    number: int


class After(NamedTuple):
    """The same by its new name."""

    number: int


def further(place):
    """A loop in a file that the upgrade leaves as it is."""
    return place.number + 1


def test_what_other_code_left_on_disk_is_not_read(monkeypatch, tmp_path):
    """An upgrade in place: the index of compiled loops names a class that is gone."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def called(code, place):
        monkeypatch.setattr(compiled, "code", lambda: code)
        monkeypatch.setattr(further, "__qualname__", "further")
        function = compiled.compiled(further)
        return function(place), sum(function.stats.cache_hits.values())

    place = Before(2)
    assert called("before", place) == (3, 0) and called("before", place) == (3, 1)
    monkeypatch.delattr(sys.modules[__name__], "Before")
    with pytest.raises(AttributeError):  # what numba does by itself
        called("before", After(2))
    assert called("after", After(2)) == (3, 0)


def test_a_first_call_says_why_it_takes_long_once_and_for_loops_of_kvlab_alone(caplog):
    def twice(number):
        return 2 * number

    compiled.announce.cache_clear()
    for module, lines in (("theirs", 0), ("kvlab.codecs.loops", 1), ("kvlab.codecs.loops", 1)):
        twice.__module__ = module
        assert numba.njit(twice)(3) == 6
        assert len(caplog.records) == lines


def test_each_file_of_the_codecs_is_in_the_name_of_what_is_kept(monkeypatch, tmp_path):
    folder = tmp_path / "codecs" / "shared"
    (tmp_path / "codecs" / "klt").mkdir(parents=True)
    folder.mkdir()
    constants = tmp_path / "codecs" / "klt" / "bits.py"
    constants.write_text("VALUE_BITS = 8\n")
    monkeypatch.setattr(compiled, "__file__", str(folder / "compiled.py"))
    code = inspect.unwrap(CODE)
    first = code()
    constants.write_text("VALUE_BITS = 9\n")
    second = code()
    constants.rename(constants.with_name("value.py"))
    assert len({first, second, code()}) == 3


@pytest.mark.parametrize("rotary", ["before", pytest.param("after", marks=AFTER)])
def test_without_numba_the_same_is_read(monkeypatch, rotary):
    """`klt` before the rotary embedding or after it: compiled, and as torch alone does it without numba.

    And written.
    """
    heads, dim = 3, 64
    codec = build(KltStream(bits=3, block_size=64), ladder_making.calibration(heads, dim))
    rows = [rows_of(codec, Site(0, LAYER, stream), heads, dim) for stream in "kv"]
    angle = torch.arange(60)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
    rotation = turn_of(rotary, angle, rows[0])
    compiled = LayerPages(LAYER, *rows, rotation)
    monkeypatch.setattr(layer, "compiled", lambda: False)
    plain = LayerPages(LAYER, *rows, rotation)
    assert compiled.quick != plain.quick == (None, None)
    k, v, positions = planted(heads, 50, dim, 0), planted(heads, 50, dim, 1), torch.arange(3, 53)
    k[:, 7] *= 50
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:50]
    pages = torch.zeros(20, 1, BLOCK, plain.bytes, dtype=torch.uint8)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    plain.write(k, v, pages, slots, positions)
    own = torch.zeros_like(pages)
    compiled.write(k, v, own, slots, positions)
    assert torch.equal(own, pages)
    due, found = plain.read(pages, slots, positions), compiled.read(pages, slots, positions)
    torch.testing.assert_close(found.k, due.k, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found.v, due.v, atol=1e-4, rtol=1e-4)


def turn_of(rotary, angle, k):
    """What stands between attention and K's rows, by angles [positions, dim / 2] and what some scale attention by."""
    rotation = Rotation(1.3 * torch.cat((angle.cos(), angle.sin()), dim=1))
    return MeanByPosition(rotation, k.plan.decoding.mean) if rotary == "after" else rotation


@given(rows=st.integers(1, 7), columns=st.integers(1, 150), n=st.integers(0, 9), at=st.integers(0, 5))
def test_sums_of_lines_are_matrix_products(rows, columns, n, at):
    """Blocks of three rows, single rows, whole vectors and what is left; nothing beside `out` is touched."""
    draw = np.random.default_rng(rows + 8 * columns + 1500 * n)
    weights, lines = (
        draw.standard_normal((rows, n), np.float32),
        draw.standard_normal((n, columns + at + 3), np.float32),
    )
    whole = draw.standard_normal((rows + 1, columns + 2), np.float32)
    before, out = whole.copy(), whole[:rows, 1:-1]
    add_lines(weights, lines, at, out)
    due = before[:rows, 1:-1] + weights @ lines[:, at : at + columns]
    np.testing.assert_allclose(out, due, rtol=1e-4, atol=1e-5)
    before[:rows, 1:-1] = out
    np.testing.assert_array_equal(whole, before)


@given(bytes=st.integers(1, 40), tokens=st.integers(0, 40), first=st.integers(0, 9))
def test_bytes_of_tokens_turned_round_lie_side_by_side(bytes, tokens, first):
    """Whole blocks of sixteen by sixteen, a block that begins in another's, and what is left of tokens."""
    draw = np.random.default_rng(bytes + 41 * tokens)
    rows = draw.integers(0, 256, (50, first + bytes + 3), np.uint8)
    slots, found = draw.permutation(50)[:tokens], np.zeros((bytes + 1, 64), np.uint8)
    turned_round(rows, slots, first, found[:bytes])
    np.testing.assert_array_equal(found[:bytes, :tokens], rows[slots, first : first + bytes].T)
    assert not found[bytes].any() and not found[:, tokens:].any()


@AFTER
@pytest.mark.parametrize(("bits", "tokens"), [(1, 5), (2, 300), (3, 5), (4, 70), (6, 9), (8, 3)])
@pytest.mark.parametrize("heads", [3, 6], ids=["one-group", "two-groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_served_rows_are_torch_s_and_read_as_torch_reads_them(heads, bits, tokens, dtype):
    """By one loop each way; a value between two of a table's may fall to either side."""
    dim = 64
    codec = build(KltStream(bits=bits, block_size=64, escape=False), ladder_making.calibration(heads, dim))
    rows = [rows_of(codec, Site(0, LAYER, stream), heads, dim) for stream in "kv"]
    angle = torch.arange(200 + tokens)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
    pages = LayerPages(LAYER, *rows, turn_of("after", angle, rows[0]))
    slots, places = torch.randperm(80 * BLOCK)[:tokens], torch.arange(200, 200 + tokens)
    k, v = (planted(heads, tokens, dim, seed).to(dtype) for seed in (0, 1))
    held = torch.zeros(80, 1, BLOCK, pages.bytes, dtype=torch.uint8)
    pages.write(k.transpose(0, 1), v.transpose(0, 1), held, slots, places)
    due = torch.cat((rows[0].encode(pages.rotation.undo(k, places).float()), rows[1].encode(v.float())), dim=1)
    found = held.view(-1, pages.bytes)
    assert (found[slots] != due).float().mean() < 1e-3
    untouched = torch.ones(len(found), dtype=torch.bool)
    untouched[slots] = False
    assert not found[untouched].any()
    looked = Looked.at(slots.numpy(), [tokens], [200], [0, 1], np.array([200 + tokens]))
    q = torch.randn(1, 2 * heads, dim) / dim
    mean, log_sum = pages.attend_few(held, looked, q, 1.0)
    keys = pages.read(held, slots, places)
    own, values = (part.repeat_interleave(2, 0).double() for part in (keys.k, keys.v))
    scores = torch.einsum("hd,hnd->hn", q[0].double(), own)
    torch.testing.assert_close(
        mean[0].double(), torch.einsum("hn,hnd->hd", scores.softmax(-1), values), atol=2e-5, rtol=1e-4
    )
    torch.testing.assert_close(log_sum[0].double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)


@AFTER
@pytest.mark.parametrize("lengths", [(300, 40, 3), (3, 9, 1)], ids=["one-reads-nothing-coded", "none-reads-coded"])
@pytest.mark.parametrize(
    ("dtype", "threads"), [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1), (torch.float16, 1)]
)
def test_one_call_writes_and_attends_as_several_do(dtype, threads, lengths, monkeypatch):
    """A step of single queries with exact tokens, beside torch alone."""
    dim, heads, ring = 64, 3, Ring(sink=2, recent=8)
    codec = build(KltStream(bits=2, block_size=64, escape=False), ladder_making.calibration(heads, dim))
    rows = [rows_of(codec, Site(0, LAYER, stream), heads, dim) for stream in "kv"]
    angle = torch.arange(300)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
    step = ServerStep.of([0, 1, 2, 3], lengths, torch.arange(3 * 300 // BLOCK).view(3, -1), BLOCK)
    step = ring.beside(
        step, np.arange(3), np.minimum(lengths, 2), np.maximum(np.array(lengths) - 8, np.minimum(lengths, 2))
    )
    held = torch.randint(0, 256, (3 * 300 // BLOCK, 1, BLOCK, sum(one.bytes for one in rows)), dtype=torch.uint8)
    store = torch.randn(2, 3, heads, ring.tokens, dim).to(dtype)
    k, v = (planted(heads, 3, dim, seed).transpose(0, 1).to(dtype) for seed in (0, 1))
    q = torch.randn(3, 2 * heads, dim).to(dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = []
    for loops in (True, False):
        pages = LayerPages(LAYER, *rows, turn_of("after", angle, rows[0]), loops=loops)
        own, kept = held.clone(), store.clone()
        pages.write(k, v, own, step.own_slots(), step.positions, step.exact, kept)
        found.append((own, kept, pages.attend(own, q, step, 1 / dim, kept).mean))
    (one, its, mean), (other, theirs, due) = found
    assert (one != other).float().mean() < 1e-3 and torch.equal(its, theirs) and not torch.equal(its, store)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # torch rounds to the dtype in between
    torch.testing.assert_close(mean, due, atol=tolerance, rtol=tolerance)


def test_tables_are_what_their_addresses_say_also_of_a_copy():
    codec = build(KltStream(bits=3, block_size=64, escape=False), ladder_making.calibration(6, 64))
    plan = rows_of(codec, Site(0, LAYER, "k"), 6, 64).plan
    one = StreamTables(active_of(plan), way_of(plan, plan.back))
    two = copy.deepcopy(one)
    assert not set(one.addresses[:, 0]) & set(two.addresses[:, 0])
    for tables in (one, two):
        for found, due in zip(tables_of(tables.addresses), (one.active, one.way), strict=True):
            for part, own in zip(found, due, strict=True):
                np.testing.assert_array_equal(part.flat, own.flat, strict=True)


@AFTER
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_served_token_that_cannot_be_coded_is_refused_and_nothing_written(bad):
    dim, heads = 64, 3
    codec = build(KltStream(bits=2, block_size=64, escape=False), ladder_making.calibration(heads, dim))
    rows = [rows_of(codec, Site(0, LAYER, stream), heads, dim) for stream in "kv"]
    angle = torch.arange(8)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
    pages = LayerPages(LAYER, *rows, turn_of("after", angle, rows[0]))
    k, v = (planted(heads, 2, dim, seed) for seed in (0, 1))
    v[1, 1, 7] = bad
    held = torch.zeros(4, 1, BLOCK, pages.bytes, dtype=torch.uint8)
    with pytest.raises(NonFinite):
        pages.write(k.transpose(0, 1), v.transpose(0, 1), held, torch.arange(2), torch.arange(2))
    assert not held.view(-1, pages.bytes)[:, pages.k.bytes :].any()


@pytest.mark.parametrize("rotary", ["before", pytest.param("after", marks=AFTER)])
@pytest.mark.parametrize("heads", [3, 6], ids=["one-group", "two-groups"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1.0, 1e3], ids=["usual", "without-tables"])
def test_compiled_attention_of_few_queries_is_torch_s(heads, threads, size, rotary):
    """Sequences of several lengths, one cut into runs, queries that see a part or nothing; the same on each number of
    threads. Vectors without tables hold more beside their rows than there is room for."""
    dim, lengths = 64, [1100, 40, 3]
    escape = rotary == "before"
    codec = build(KltStream(bits=2, block_size=64, escape=escape), ladder_making.calibration(heads, dim))
    rows = [rows_of(codec, Site(0, LAYER, stream), heads, dim) for stream in "kv"]
    angle = torch.arange(1200)[:, None] / 100 ** (torch.arange(0, dim, 2) / dim)
    pages = LayerPages(LAYER, *rows, turn_of(rotary, angle, rows[0]))
    assert isinstance(pages.attention, ServedAttention) == (rotary == "after")
    total = sum(lengths)
    slots, places = torch.randperm(1200)[:total], torch.cat([torch.arange(length) for length in lengths])
    held = torch.zeros(300, 1, BLOCK, pages.bytes, dtype=torch.uint8)
    x = [size * planted(heads, total, dim, seed).transpose(0, 1) for seed in (0, 1)]
    pages.write(*x, held, slots, places)
    until = torch.tensor([1100, 38, 40, 0])
    looked = Looked.at(slots.numpy(), lengths, [0, 0, 0], [0, 1, 3, 4], until.numpy())
    q = torch.randn(4, 2 * heads, dim) / dim / size
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        mean, log_sum = pages.attend_few(held, looked, q, 1.0)
    finally:
        torch.set_num_threads(before)
    keys = pages.read(held, slots, places)
    k, v = (part.repeat_interleave(2, 0).double() for part in (keys.k, keys.v))
    first = 0
    for length, own in zip(lengths, ([0], [1, 2], [3]), strict=True):
        for query in own:
            seen = slice(first, first + int(until[query]))
            scores = torch.einsum("hd,hnd->hn", q[query].double(), k[:, seen])
            due = torch.einsum("hn,hnd->hd", scores.softmax(-1), v[:, seen])
            if until[query]:  # what a query makes of nothing is finite, and weighs nothing
                torch.testing.assert_close(mean[query].double(), due, atol=2e-5 * size, rtol=1e-4)
            assert mean[query].isfinite().all()
            torch.testing.assert_close(log_sum[query].double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
        first += length

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.block import outliers
from kvlab.codecs.stream import packing
from kvlab.core.errors import StreamError
from tiers import examples


def bit_string(symbols, bits):
    """Packing by the book: an integer whose bits are the symbols, lowest first, as little-endian bytes."""
    number = sum(int(symbol) << (bits * i) for i, symbol in enumerate(symbols))
    return number.to_bytes(-(-len(symbols) * bits // 8), "little")


@examples(200)
@given(st.integers(0, 8), st.integers(1, 70), st.integers(0, 2**32), st.integers(1, 3))
def test_packing_round_trip_size_and_layout(bits, count, seed, vectors):
    source = torch.Generator().manual_seed(seed)
    symbols = torch.randint(0, 2**bits, (vectors, count), generator=source)
    packed = packing.pack(symbols, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (vectors, packing.packed_size(count, bits))
    assert packed.shape[1] == -(-count * bits // 8)
    assert torch.equal(packing.unpack(packed, bits, count), symbols)
    assert [bytes(row.tolist()) for row in packed] == [bit_string(row, bits) for row in symbols]


@examples(60)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 2**32), st.sampled_from([(1,), (3,), (2, 5)]))
def test_look_up_is_unpacking_and_indexing(bits, count, seed, vectors):
    source = torch.Generator().manual_seed(seed)
    symbols = torch.randint(0, 2**bits, (*vectors, count), generator=source)
    table = torch.randn(2**bits, generator=source)
    found = packing.LookUp(table, bits)(packing.pack(symbols, bits), count)
    assert torch.equal(found, table[symbols])


def test_any_integer_type_is_packed():
    symbols = torch.arange(16)
    packed = [packing.pack(symbols.to(dtype), 4) for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)]
    assert all(torch.equal(one, packed[0]) for one in packed)


@examples(60)
@given(st.sampled_from([1, 8, 128, 256, 512]), st.sampled_from([1e-9, 0.5, 2.0, 9.0]), st.integers(0, 99))
def test_outliers_restore_exactly_what_was_taken(width, threshold, seed):
    z = torch.randn(5, width, generator=torch.Generator().manual_seed(seed))
    z[0, 0] = threshold
    apart = outliers.take(z, threshold)
    beyond = z.abs() > threshold
    assert apart.counts.to(torch.int64).tolist() == beyond.sum(-1).tolist()
    expected = torch.where(beyond, z.half().float(), torch.full_like(z, 7.5))
    assert torch.equal(outliers.restore(torch.full_like(z, 7.5), apart), expected)


def test_outlier_fields_cannot_overflow():
    for width, count_size, place_size in [(128, 1, 1), (256, 2, 1), (512, 2, 2)]:
        apart = outliers.take(torch.full((3, width), 5.0), 1.0)
        assert apart.counts.to(torch.int64).tolist() == [width] * 3
        assert apart.places.to(torch.int64).max() == width - 1
        assert (apart.counts.element_size(), apart.places.element_size()) == (count_size, place_size)
        assert apart.values.dtype == torch.float16


def test_outliers_that_cannot_be_are_refused():
    z = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    apart = outliers.take(z, 0.5)
    for wrong in (
        replace(apart, counts=apart.counts + 1),
        replace(apart, places=apart.places[1:]),
        replace(apart, places=torch.full_like(apart.places, 32)),
    ):
        with pytest.raises(StreamError):
            outliers.restore(z, wrong)


def test_outlier_threshold_is_strict():
    assert outliers.take(torch.tensor([[2.0, -2.0, 2.001]]), 2.0).places.tolist() == [2]


def test_bits_for_is_the_least_that_numbers_them_all():
    for count in (*range(1, 70), 255, 256, 257, 2**40, 2**40 + 1):
        bits = packing.bits_for(count)
        assert 2**bits >= count and (bits == 0 or 2 ** (bits - 1) < count)

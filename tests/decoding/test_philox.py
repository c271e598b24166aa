"""Philox: known answers, one number alone and in an array, uniformity, independence of streams."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvlab_mechanisms.decoding.philox import DRAFTER, MASK, TARGET, philox, uniform, uniforms

# of the authors' own distribution (Random123, kat_vectors): counter, key, answer
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers_by_number_and_by_array(counter, key, answer):
    assert philox(counter, key) == answer
    arrays = philox(tuple(np.full(3, c, np.uint64) for c in counter), key)
    assert all((words == word).all() for words, word in zip(arrays, answer, strict=True))


def test_an_array_holds_what_each_of_its_numbers_is_alone():
    many = uniforms(seed=7, step=2**40 + 3, count=50)
    assert many.tolist() == [uniform(7, 2**40 + 3, draw) for draw in range(50)]


def test_numbers_are_uniform_and_streams_independent():
    a, b = uniforms(1, 0, 100_000), uniforms(1, 0, 100_000, DRAFTER)
    assert 0 <= a.min() < a.max() < 1
    assert stats.kstest(a, "uniform").pvalue > 1e-3
    cells = np.histogram2d(a, b, bins=10)[0].ravel()
    assert stats.chisquare(cells).pvalue > 1e-3


def test_every_part_of_the_place_counts():
    places = [(1, 0, 0, TARGET), (2, 0, 0, TARGET), (1, 1, 0, TARGET), (1, 0, 1, TARGET), (1, 0, 0, DRAFTER)]
    places += [(1 + 2**32, 0, 0, TARGET), (1, 2**32, 0, TARGET)]
    assert len({uniform(*place) for place in places}) == len(places)

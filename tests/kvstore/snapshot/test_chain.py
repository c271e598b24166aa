"""The token chain: equal links mean equal tokens from the first on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.kvstore.snapshot.chain import links, read_tokens, root, shared, token_bytes
from kvstore.snapshot import making
from kvstore.snapshot.making import CHUNKS, GEOMETRY

SIZE = GEOMETRY.chunk_tokens
LENGTH = CHUNKS * SIZE

ids = st.integers(0, 2**32 - 1)


@given(st.lists(ids, max_size=40), st.lists(ids, max_size=40), st.integers(1, 7))
def test_shared_links_are_the_whole_chunks_of_the_shared_tokens(ours, theirs, size):
    common = next((n for n, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))  # noqa: B905
    assert shared(links(ours, size), links(theirs, size)) == common // size


@given(st.lists(ids, max_size=40), st.integers(1, 7))
def test_links_grow_with_the_tokens_and_never_change(tokens, size):
    whole = links(tokens, size)
    assert len(whole) == len(tokens) // size
    for end in range(len(tokens)):
        assert links(tokens[:end], size) == whole[: end // size]


@given(st.lists(ids))
def test_tokens_come_back(tokens):
    assert list(read_tokens(token_bytes(tokens))) == tokens


def test_a_link_says_which_chunk_it_is_of():
    """Equal chunks at other places, in other chunk sizes or under another salt have other links."""
    found = [*links([5] * 12, 4), *links([5] * 12, 6), *links([5] * 12, 4, salt="a"), root(), root("a")]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("edited", range(LENGTH))
def test_an_edited_history_reuses_what_is_before_the_edit(snapshot, edited):
    prompt = making.tokens(LENGTH + 10)
    prompt[edited] += 1
    assert snapshot.usable_prefix(prompt) == edited // SIZE * SIZE


@pytest.mark.parametrize("length", range(LENGTH + 3))
def test_a_prompt_shorter_or_longer_than_the_snapshot(snapshot, length):
    assert snapshot.usable_prefix(making.tokens(length)) == min(length, LENGTH) // SIZE * SIZE


def test_a_missing_or_added_token_moves_all_that_follow(snapshot):
    prompt = making.tokens(LENGTH)
    assert snapshot.usable_prefix(prompt[:9] + prompt[10:]) == 2 * SIZE
    assert snapshot.usable_prefix([*prompt[:9], 1, *prompt[9:]]) == 2 * SIZE
    assert snapshot.usable_prefix([0, *prompt]) == 0

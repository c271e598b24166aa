"""Eviction at equal bytes: what stays, what it takes, and that keeping everything costs nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiers import examples
from validation.bench import eviction

pytestmark = pytest.mark.full


@examples(100)
@given(st.floats(0.01, 20), st.integers(1, 600), st.sampled_from([8, 64, 128]))
def test_what_is_kept_takes_no_more_than_its_bits_and_one_more_would(bits, context, head_dim):
    kept = eviction.kept_tokens(bits, context, head_dim)
    assert 0 <= kept <= context
    assert eviction.bits_of(kept, context, head_dim) <= bits
    assert kept == context or eviction.bits_of(kept + 1, context, head_dim) > bits


def test_the_window_keeps_the_first_tokens_and_the_last_ones():
    assert eviction.chosen("window", eviction.by_window(50, 2), 10).tolist() == [[0, 1, 2, 3, *range(44, 50)]] * 2


def test_attention_decides_for_each_kv_head_and_the_last_ones_stay():
    attention = torch.zeros(4, 100, 100)
    attention[0, 80, 7], attention[3, 90, 20] = 5.0, 5.0
    scores = eviction.by_attention(attention, group=2)
    for policy, kept in (("h2o", 20), ("snapkv", eviction.OBSERVED + eviction.POOLED)):
        first, second = (set(row) for row in eviction.chosen(policy, scores[policy], kept).tolist())
        assert 7 in first and 7 not in second and 20 in second and 20 not in first
        assert set(range(90, 100)) <= first & second
    early = torch.zeros(2, 100, 100)
    early[:, 10, 5] = 1.0  # a query that SnapKV does not ask
    scores = eviction.by_attention(early, group=2)
    assert scores["h2o"][0].argmax() == 5 and scores["snapkv"][0, :60].max() == 0


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "a.txt"
    text.write_text(" ".join(f"word {number} of the text" for number in range(3000)))
    return eviction.measure(tiny_model, text, [2.0, 8.0], 96, 16, 2)


def test_keeping_everything_costs_nothing_and_less_costs_more(found):
    rows = {(row["policy"], row["kept"]): row["kl"]["value"] for row in found["rows"]}
    (everything,) = (kl for (policy, _), kl in rows.items() if policy == "everything")
    assert everything < 1e-6
    few, many = sorted({kept for policy, kept in rows if policy != "everything"})
    for policy in ("window", "h2o", "snapkv"):
        assert rows[policy, few] > rows[policy, many] > 10 * everything

"""The host tier: bit for bit back, within its budget, early where that was asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core.errors import PagerError, PoolExhausted
from kvlab_mechanisms.memory.host_tier import HostTier
from refusals import refused

pytestmark = pytest.mark.full


def page(number: int, size: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((2, size // 2), number).to(dtype)


@pytest.fixture
def tier():
    found = HostTier(1000)
    yield found
    found.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pages_come_back_bit_for_bit_and_stay(tier, dtype):
    given = torch.randn(3, 5).mul(9).to(dtype)
    tier.offload("a", given)
    wanted = given.clone()
    given.zero_()
    for _ in range(2):
        found = tier.fetch("a")
        assert found.dtype == dtype and torch.equal(found, wanted)
        found.zero_()


def test_nan_and_what_is_not_contiguous(tier):
    given = torch.tensor([[1.0, torch.nan], [torch.inf, -0.0]]).T
    tier.offload("a", given)
    assert torch.equal(tier.fetch("a").contiguous().view(torch.int32), given.contiguous().view(torch.int32))


def test_what_was_asked_for_before_is_early(tier):
    tier.offload("a", page(1))
    tier.prefetch("a")
    tier.prefetch("a")
    assert torch.equal(tier.fetch("a"), page(1))
    assert torch.equal(tier.fetch("a"), page(1))
    assert (tier.traffic.early, tier.traffic.late, tier.traffic.bytes_back) == (1, 1, 128)


def test_a_page_that_is_on_its_way_back_may_go(tier):
    tier.offload("a", page(1))
    tier.prefetch("a")
    tier.evict("a")
    tier.offload("b", page(2))
    assert torch.equal(tier.fetch("b"), page(2))
    for call in (tier.fetch, tier.prefetch, tier.evict):
        with refused(PagerError, "pager.no-page", "'a'"):
            call("a")


def test_the_one_used_longest_ago_goes():
    tier = HostTier(3 * 64)
    for name in "abc":
        tier.offload(name, page(1))
    tier.fetch("a")
    tier.offload("d", page(2))
    assert [name in tier for name in "abcd"] == [True, False, True, True]
    assert tier.traffic.dropped == 1
    tier.close()


def test_a_page_that_was_asked_for_does_not_go_next():
    tier = HostTier(2 * 64)
    tier.offload("a", page(1))
    tier.offload("b", page(2))
    tier.prefetch("a")
    tier.offload("c", page(3))
    assert [name in tier for name in "abc"] == [True, False, True]
    assert torch.equal(tier.fetch("a"), page(1)) and tier.traffic.early == 1
    tier.close()


def test_a_page_beyond_the_budget_is_refused_and_nothing_goes(tier):
    tier.offload("a", page(1))
    with refused(PoolExhausted, "pool-exhausted.page-too-large", "1200 bytes"):
        tier.offload("a", page(1, 300))
    assert torch.equal(tier.fetch("a"), page(1))


def test_a_page_that_comes_again_is_the_new_one(tier):
    tier.offload("a", page(1))
    tier.offload("a", page(2))
    assert torch.equal(tier.fetch("a"), page(2))
    assert tier.nbytes == 64


@settings(deadline=None, max_examples=50)
@given(calls=st.lists(st.tuples(st.sampled_from("ope"), st.integers(0, 5), st.sampled_from([8, 16, 40])), max_size=40))
def test_budget_and_counts_hold_after_any_calls(calls):
    tier, model = HostTier(400), {}
    for call, key, size in calls:
        if call == "o":
            tier.offload(key, page(key, size))
            model[key] = size
        elif key in tier:
            tier.prefetch(key) if call == "p" else tier.evict(key)
        model = {known: wide for known, wide in model.items() if known in tier}
        assert tier.nbytes <= 400
        assert sum(4 * wide for wide in model.values()) <= tier.nbytes
    for key, size in model.items():
        assert torch.equal(tier.fetch(key), page(key, size))
    assert tier.traffic.bytes_back == sum(4 * size for size in model.values())
    tier.close()


def test_what_was_written_over_in_its_place_is_the_new_page_and_the_fetched_one_stays(tier):
    tier.offload("a", page(1))
    held = tier.fetch("a")
    tier.offload("a", page(2))
    assert torch.equal(held, page(1)) and torch.equal(tier.fetch("a"), page(2))
    tier.prefetch("a")
    tier.offload("a", page(3))  # the old one is on its way
    assert torch.equal(tier.fetch("a"), page(3))
    tier.offload("a", page(4, dtype=torch.bfloat16))  # another form takes another buffer
    assert torch.equal(tier.fetch("a"), page(4, dtype=torch.bfloat16))


def test_a_sequence_that_was_swapped_out_goes_on_as_if_it_had_not_been(hf_engine):
    model, tier = hf_engine.model, HostTier(1 << 20)
    ids = torch.randint(3, 200, (1, 24), generator=torch.Generator().manual_seed(0))

    def written(cache, first: int) -> list[int]:
        tokens = [first]
        for _ in range(12):
            logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens

    with torch.no_grad():
        plain, swapped = (model(ids, use_cache=True) for _ in range(2))
        cache, first = swapped.past_key_values, int(plain.logits[0, -1].argmax())
        for number, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                one = getattr(layer, name)
                tier.offload((number, name), one)
                one.fill_(torch.nan)  # its pages are another's now
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = (tier.fetch((number, name)) for name in ("keys", "values"))
        assert written(cache, first) == written(plain.past_key_values, first)
    tier.close()

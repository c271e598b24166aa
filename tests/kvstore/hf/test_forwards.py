"""Prefill and decoding over a pool: the same forwards give the same bits, wherever the blocks lie."""

from __future__ import annotations

import pytest
import torch

from kvlab.core.errors import ModelError, PagerError, UnknownName, UserError
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.residency import build
from kvstore.hf.prompts import POLICIES, prompt, run_after, same_chunks
from refusals import refused

pytestmark = pytest.mark.full  # snapshots, which FINDINGS.md does not need


def test_decoding_writes_what_the_model_writes(model, roomy):
    tokens = prompt(50)
    run = run_after(tokens, model, roomy)
    ours = run.decode(20)
    theirs = model.model.generate(
        torch.tensor([tokens]), attention_mask=torch.ones(1, 50), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert list(ours.tokens) == theirs[0, 50:].tolist() and run.tokens == [*tokens, *ours.tokens]
    assert ours.logits.shape == (20, 320) and ours.logits.argmax(-1).tolist() == list(ours.tokens)


def test_decoding_ends_after_a_stop_token(model, roomy):
    whole = run_after(prompt(50), model, roomy).decode(20).tokens
    run = run_after(prompt(50), model, roomy)
    ended = run.decode(20, stop={whole[4]})
    assert ended.tokens == whole[: whole.index(whole[4]) + 1] and len(ended.logits) == len(ended.tokens)
    assert run.decode(1).tokens[0] == whole[len(ended.tokens)]


def test_pieces_that_meet_where_chunks_end_are_one(model, roomy):
    tokens = prompt(77)
    whole, pieces = run_after(tokens, model, roomy), PagedRun(model, roomy)
    for part in (tokens[:16], tokens[16:64], tokens[64:]):
        pieces.extend(part)
    assert torch.equal(whole.logits, pieces.logits) and same_chunks(whole, pieces)
    assert whole.exact == pieces.exact == 72 and whole.chain == pieces.chain


@pytest.mark.parametrize("policy", POLICIES)
def test_bits_do_not_depend_on_the_blocks(model, small, policy):
    run = run_after(prompt(90), model, small, policy)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        other = run_after(prompt(90), model, small, policy, block_order=order)
        assert torch.equal(run.logits, other.logits) and same_chunks(run, other)
        assert torch.equal(run.decode(20).logits, other.decode(20).logits)
        assert run.pager.resident == other.pager.resident
        run = run_after(prompt(90), model, small, policy)


def test_slot_order_differs_by_rounding_alone(model, roomy):
    logical = run_after(prompt(90), model, roomy)
    slots = run_after(prompt(90), model, roomy, order="slot", block_order=range(31, -1, -1))
    assert not torch.equal(logical.logits, slots.logits)
    assert torch.allclose(logical.logits, slots.logits, atol=1e-4)
    with refused(UnknownName, None, "order", "random", "slot"):
        run_after([1], model, roomy, order="random")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_pool_holds_its_invariants(model, small, policy):
    run = PagedRun(model, small, policy, every=16)
    for part in (prompt(61), prompt(9, 1), prompt(40, 2)):
        run.extend(part)
        run.decode(5)
        assert run.pager.check() == [] and len(run.pager.resident) <= 5
        assert {0, run.pager.sealed - 1} <= set(run.pager.resident)
    assert run.pager.stats.page_outs > 0


def test_policies_keep_different_chunks(model, small):
    kept = {policy: run_after(prompt(120), model, small, policy, every=8).pager.resident for policy in POLICIES}
    assert kept["lru"] == (0, 11, 12, 13, 14) and len(set(kept.values())) >= 4


def test_a_policy_of_another_run_brings_no_keys(model, small):
    policy = build("qk", model.geometry(8))
    run_after(prompt(60, 1), model, small, policy)
    stale = set(policy.scorer.keys)
    again = run_after(prompt(90), model, small, policy)
    fresh = run_after(prompt(90), model, small, "qk")
    assert stale and not stale & set(policy.scorer.keys) and set(policy.scorer.keys) == set(again.chain)
    assert torch.equal(again.logits, fresh.logits) and again.pager.ledger() == fresh.pager.ledger()


@pytest.mark.parametrize("order", ["logical", "slot"])
@pytest.mark.parametrize("policy", POLICIES)
def test_attention_reads_what_is_in_the_pool_and_nothing_else(model, small, policy, order, monkeypatch):
    """One forward without any pager, under a mask that hides from each token what was out when it came."""
    tokens, visible, forward = prompt(90), torch.zeros(90, 90, dtype=torch.bool), model.forward

    def noting(part, cache, columns, start, *rest):
        visible[start : start + len(part), columns] = True
        return forward(part, cache, columns, start, *rest)

    monkeypatch.setattr(model, "forward", noting)
    run = PagedRun(model, small, policy, every=8, order=order, block_order=[3, 1, 4, 0, 2])
    ours = torch.cat([run.score(tokens[:83]), run.score(tokens[83:])])
    hidden = ~visible.tril()
    assert hidden.tril().any()
    with torch.no_grad():
        theirs = model.model(
            torch.tensor([tokens]), attention_mask=torch.zeros(90, 90).masked_fill(hidden, -torch.inf)[None, None]
        ).logits[0]
    assert (ours - theirs).abs().max() < 2e-4


@pytest.mark.parametrize("policy", ["lru", "qk", "oracle"])
def test_a_fork_goes_its_own_way(model, small, policy):
    run = run_after(prompt(70), model, small, policy)
    twin, whole = run.fork(), run_after(prompt(70), model, small, policy)
    twin.extend(prompt(30, 5))
    assert run.tokens == prompt(70) and torch.equal(run.decode(20).logits, whole.decode(20).logits)
    assert run.pager.ledger() == whole.pager.ledger() and twin.tokens == prompt(70) + prompt(30, 5)


class TestRefusals:
    def test_nothing_to_begin_with(self, model, roomy):
        run = PagedRun(model, roomy)
        with refused(UserError, "user.no-logits"):
            run.decode(1)
        with refused(UserError, "user.no-tokens"):
            run.extend([])

    @pytest.mark.parametrize("token", [-1, 320])
    def test_a_token_that_is_none(self, model, roomy, token):
        run = PagedRun(model, roomy)
        with refused(UserError, "user.no-such-token", token):
            run.extend([*prompt(20), token])
        assert run.tokens == [] and run.pager.length == 0

    def test_more_tokens_than_positions(self, model):
        run = run_after(prompt(250), model, PagerConfig(pool_tokens=512, chunk_tokens=16))
        with refused(ModelError, "model.too-long", 257, 256):
            run.decode(7)
        with refused(ModelError, "model.too-long", 257, 256):
            run.extend(prompt(7))
        assert len(run.decode(6).tokens) == 6

    def test_a_run_whose_forward_failed(self, model, roomy, monkeypatch):
        run = run_after(prompt(20), model, roomy)

        def fail(*_, **__):
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(model.model.model.layers[1].mlp, "forward", fail)
            with pytest.raises(MemoryError):
                run.extend(prompt(5))
        for go_on in (lambda: run.extend([1]), lambda: run.decode(1)):
            with refused(PagerError, "pager.broken-run"):
                go_on()


class TestExact:
    """How far a cold run would have the same bits."""

    def test_tokens_that_were_decoded_are_not(self, model, roomy):
        run = run_after(prompt(50), model, roomy)
        run.decode(30)
        run.extend(prompt(40))
        assert run.exact == 48 and len(run.chain) == 15

    def test_nor_are_those_of_a_chunk_that_came_in_pieces(self, model, roomy):
        run = run_after(prompt(50), model, roomy)
        run.extend(prompt(50))
        cold = run_after(prompt(50) * 2, model, roomy)
        assert run.exact == 48 and cold.exact == 96

    @pytest.mark.parametrize("hand", ["pin", "page_out", "page_in", "set_scores", "reselect"])
    def test_nor_what_was_read_of_a_pool_that_was_changed_by_hand(self, model, small, hand):
        """What the run read while all its chunks were there stays; after that, no cold run has this pool."""
        run = run_after(prompt(56), model, small, "qk")
        assert run.exact == 56 and not run.by_hand
        {
            "pin": lambda: run.pager.pin(8, 9),
            "page_out": lambda: run.pager.page_out(run.pager.resident[1]),
            "page_in": lambda: run.pager.page_in(run.pager.resident[1]),
            "set_scores": lambda: run.pager.set_scores([0.5]),
            "reselect": run.reselect,
        }[hand]()
        assert run.exact == 40 and run.by_hand and run.fork().exact == 40
        run.extend(prompt(16))
        assert run.exact == 40

    def test_while_everything_is_in_the_pool_hands_change_nothing(self, model, roomy):
        run = run_after(prompt(48), model, roomy, "qk")
        run.pager.pin(8, 9)
        run.reselect()
        run.extend(prompt(16))
        assert run.exact == 64

"""A run that goes on from a snapshot is the cold run, bit for bit and chunk for chunk, whatever pool and policy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlab.kvstore.hf.equality import pool_salt, same_as_cold
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.residency import build
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot import read
from kvstore.hf.prompts import POLICIES, prompt, run_after, same_chunks
from tiers import examples

pytestmark = pytest.mark.full  # snapshots, which FINDINGS.md does not need

policies = st.sampled_from(POLICIES)
selections = st.sampled_from([5, 8, 16, 24, 64])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("sameness") / "s"


@given(policies, st.sampled_from([40, 56, 256]), selections, st.integers(8, 120), st.integers(0, 20), st.data())
@examples(25)
def test_what_is_restored_is_the_cold_run(model, file, policy, pool, every, length, decoded, data):
    """The snapshot may be of a longer context, of one that was decoded, and of one that read a part of itself."""
    config = PagerConfig(pool_tokens=pool, chunk_tokens=8, sink_chunks=1, tail_chunks=1)
    old = prompt(length)
    saved = run_after(old, model, config, policy, every=every)
    if decoded:
        saved.decode(decoded)
    saved.save(file)
    new = old[: data.draw(st.integers(8, length))] + prompt(data.draw(st.integers(1, 60)), seed=1)
    found = restore(model, new, file, config, policy, mode="verify", every=every, decode=12).report
    assume(found.consumed)
    assert found.comparison.max_abs_dlogit == 0 and found.comparison.tokens_equal and found.comparison.residency_equal


@pytest.mark.parametrize("policy", POLICIES)
def test_a_context_that_read_a_part_of_itself_is_used_to_its_end(model, small, file, policy):
    """Not for nothing: all of it is reused, chunks were out, and the pool was not the last chunks alone."""
    old, new = prompt(104), prompt(104) + prompt(50, 1)
    run_after(old, model, small, policy, every=8).save(file)
    report = restore(model, new, file, small, policy, mode="verify", every=8, decode=20).report
    assert report.prefix_len == 104 and report.page_outs > 5
    assert report.comparison.max_abs_dlogit == 0 and report.comparison.residency_equal
    assert report.comparison.steps == 20


@given(policies, st.sampled_from([40, 256]), st.integers(9, 100), st.integers(1, 60))
@examples(10)
def test_what_was_restored_is_saved_as_the_cold_run_would(model, file, policy, pool, length, more):
    config = PagerConfig(pool_tokens=pool, chunk_tokens=8, sink_chunks=1, tail_chunks=1)
    tokens = prompt(length + more)
    run_after(tokens[:length], model, config, policy, every=8).save(file)
    warm = restore(model, tokens, file, config, policy, mode="consume", every=8).run
    cold = run_after(tokens, model, config, policy, every=8)
    assert warm.exact == cold.exact and warm.salts == cold.salts and warm.made == cold.made
    warm.save(file)
    with read.open(file) as ours:
        cold.save(file.with_name("cold"))
        with read.open(file.with_name("cold")) as theirs:
            assert ours.chain == theirs.chain and same_chunks(warm, cold)
            assert ours.ledger.resident == theirs.ledger.resident
            assert [e.score for e in ours.ledger.entries] == [e.score for e in theirs.ledger.entries]


class TestOtherPools:
    """K and V that were computed while chunks were out are nobody else's."""

    def salted(self, model, config, file, policy="lru", **settings) -> str:
        with read.open(run_after(prompt(80), model, config, policy, **settings).save(file).path) as snapshot:
            return snapshot.manifest.identity.salt

    def test_salts(self, model, small, roomy, file):
        salts = {
            self.salted(model, small, file, "lru"),
            self.salted(model, small, file, "qk", every=8),
            self.salted(model, small, file, "qk", every=16),
            self.salted(model, small, file, "random", seed=0),
            self.salted(model, small, file, "random", seed=1),
            self.salted(model, PagerConfig(48, 8, 1, 1), file, "lru"),
            self.salted(model, PagerConfig(48, 8, 2, 1), file, "lru"),
            self.salted(model, PagerConfig(48, 8, 1, 2), file, "lru"),
            self.salted(model, small, file, salt="mine"),
        }
        assert len(salts) == 9 and "" not in salts
        assert self.salted(model, roomy, file, salt="mine") == "mine"
        assert self.salted(model, small, file, "lru", every=8) == self.salted(model, small, file, "lru", every=16)

    def test_what_came_before_the_first_eviction_is_everybodys(self, model, small, roomy, file):
        run_after(prompt(80), model, small).save(file, upto=40)
        for config, policy in ((small, "qk"), (roomy, "lru"), (roomy, "oracle")):
            report = restore(model, prompt(80), file, config, policy, mode="verify", every=8).report
            assert report.prefix_len == (32 if (config, policy) == (small, "qk") else 40)
            assert report.comparison.max_abs_dlogit == 0 and report.comparison.residency_equal

    def test_a_whole_context_serves_a_small_pool_as_far_as_the_pool_reaches(self, model, small, roomy, file):
        run_after(prompt(80), model, roomy).save(file)
        report = restore(model, prompt(90), file, small, mode="verify").report
        assert report.prefix_len == 40 and report.comparison.max_abs_dlogit == 0
        with read.open(file) as snapshot:
            whole, _ = PagedRun.restored(model, snapshot, 80, small)
        whole.extend(prompt(90)[80:])
        cold = run_after(prompt(90), model, small)
        assert not torch.equal(whole.logits, cold.logits)  # its chunks have read more: allowed by hand, and not exact
        assert whole.exact == 40 and cold.exact == 88

    def test_a_smaller_pool_is_no_larger_one(self, model, small, roomy, file):
        run_after(prompt(80), model, small).save(file)
        report = restore(model, prompt(90), file, roomy).report
        assert not report.consumed and [code for code, _ in report.reasons] == ["salt"]
        assert "pool 5 chunks" in report.reasons[0].message


@pytest.mark.parametrize("policy", ["lru", "qk"])
@pytest.mark.parametrize("hand", [lambda pager: pager.page_in(1), lambda pager: pager.set_scores([3.0, 2.0, 1.0])])
@pytest.mark.parametrize("further", [0, 8])
def test_hands_on_a_whole_context_leave_no_trace_in_what_is_saved(model, small, roomy, file, policy, hand, further):
    """Its K and V are a cold run's; when each chunk was asked for, and how it scores, is not."""
    run = run_after(prompt(40), model, roomy, policy, every=8)
    hand(run.pager)
    if further:
        run.extend(prompt(40 + further)[40:])
    run.save(file)
    report = restore(model, prompt(64), file, small, policy, mode="verify", every=8, decode=12).report
    assert report.prefix_len == (40 if policy == "lru" else 32)
    assert report.comparison.max_abs_dlogit == 0 and report.comparison.residency_equal


def test_as_far_as_scores_hold(model, small, roomy, file):
    """By hand: of 10 chunks, scored at 64 and 80, with room for 5."""
    saved = run_after(prompt(80), model, small, "qk", every=16).save(file).manifest
    policy, at = build("qk", model.geometry(8)), partial(same_as_cold, saved, config=small, salt="")
    assert saved.identity.salt == pool_salt("", small, policy, 16) and saved.made["scored_at"] == "80"
    assert at(80, policy=policy, every=16) == 80
    assert at(72, policy=policy, every=16) == 24  # new scores come at 32 at the latest, the first eviction after 40
    assert at(16, policy=policy, every=16) == 16
    assert at(80, policy=build("lru", model.geometry(8)), every=16) == 40
    assert at(80, policy=policy, every=64) == 0

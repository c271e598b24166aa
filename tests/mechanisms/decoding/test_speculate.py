"""Speculation on a model: what is written is the target's, whatever drafts; what is counted is what happened."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import DynamicCache

from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.recipes import named_recipe
from kvlab.core.recipe import IDENTITY, Recipe
from kvlab_mechanisms.decoding.acceptance import BesideExact, CompressedKVDrafter
from kvlab_mechanisms.decoding.law import Sampling, law
from kvlab_mechanisms.decoding.speculate import SpeculationReport, plain, speculate
from kvlab_mechanisms.decoding.verify import Draft, Verified

pytestmark = pytest.mark.nightly

PROMPT = torch.randint(1, 320, (24,), generator=torch.Generator().manual_seed(1)).tolist()
GREEDY = Sampling(0)
HADAMARD = named_recipe("hadamard", bits=3)
KIVI = Recipe(k=KiviStream(bits=4, axis="channel", group=8, block_size=8), v=KiviStream(bits=4, axis="token", group=8))
CODECS = {"identity": IDENTITY, "hadamard": HADAMARD, "kivi": KIVI}


class Wrong:
    """Drafts the same chains whatever the text."""

    def __init__(self, model, chains):
        self.cache, self.chains, self.states = DynamicCache(config=model.config), chains, []

    def draft(self, text, tokens, step):
        return Draft([chain[:tokens] for chain in self.chains])

    def observe(self, hidden):
        self.states.append(hidden)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("draft", [1, 4])
def test_greedy_speculation_writes_the_greedy_text(model, codec, draft):
    want = model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    drafter = CompressedKVDrafter(model, CODECS[codec], GREEDY)
    written = speculate(model, drafter, PROMPT, 40, draft, GREEDY)
    assert written.tokens == want[0, len(PROMPT) :].tolist() == plain(model, PROMPT, 40, GREEDY)
    if codec == "identity":
        assert written.report.accepted == written.report.drafted
    assert drafter.cache.get_seq_length() == drafter.cache.exact.get_seq_length() == len(PROMPT) + 39


def test_no_draft_however_wrong_changes_a_greedy_text(model):
    want = plain(model, PROMPT, 30, GREEDY)
    drafter = Wrong(model, [[5, 6, 7], [want[0], want[1], 9], [want[0], 3, 3]])
    written = speculate(model, drafter, PROMPT, 30, 3, GREEDY)
    assert written.tokens == want
    assert written.report.accepted[0] == 2
    assert len(drafter.states) == len(written.report.accepted) + 1


def test_two_sampled_tokens_have_the_targets_law(model):
    recipe, runs, own = named_recipe("int", bits=2), 200, Sampling(1.5, 3)
    pairs = {}
    for seed in range(runs):
        mine = Sampling(1.5, 3, seed=seed)
        tokens = speculate(model, CompressedKVDrafter(model, recipe, mine), PROMPT[:8], 2, 2, mine).tokens
        pairs[tuple(tokens)] = pairs.get(tuple(tokens), 0) + 1
    expected = joint(model, PROMPT[:8], own)
    assert set(pairs) <= set(expected)
    counts = np.array([pairs.get(pair, 0) for pair in expected])
    assert stats.chisquare(counts, runs * np.array(list(expected.values()))).pvalue > 1e-3


@torch.no_grad()
def joint(model, prompt, own) -> dict[tuple[int, int], float]:
    def next_of(text):
        found = law(model(torch.tensor([text])).logits[:, -1], [own])
        return [(int(i), float(p)) for i, p in zip(found.ids[0], found.p[0], strict=True) if p > 0]

    return {(a, b): p * q for a, p in next_of(prompt) for b, q in next_of([*prompt, a])}


def test_what_is_coded_is_the_exact_cache_and_drafting_leaves_no_trace(model):
    drafter = CompressedKVDrafter(model, HADAMARD, GREEDY)
    written = speculate(model, drafter, PROMPT, 12, 4, GREEDY)
    alone = BesideExact(model, HADAMARD)
    with torch.no_grad():
        model(torch.tensor([PROMPT + written.tokens[:-1]]), past_key_values=alone)
    for layer in range(3):
        for got, want in zip(drafter.cache.decoded(layer), alone.decoded(layer), strict=True):
            assert torch.allclose(got, want, atol=0.02 * float(want.abs().max()))
    assert sum(written.report.accepted) + len(written.report.accepted) == 12


def test_overlap_is_near_one_for_a_fine_codec_and_falls_with_its_bits(model):
    def alpha(bits):
        recipe = Recipe(k=HadamardStream(bits=bits), v=HadamardStream(bits=bits))
        own = Sampling(seed=3)
        return speculate(model, CompressedKVDrafter(model, recipe, own), PROMPT, 24, 3, own, measure=True).report.alpha

    assert 1 >= alpha(6) > alpha(2) > 0
    assert alpha(6) > 0.9


def test_counts():
    report = SpeculationReport()
    assert np.isnan(report.tokens_per_call) and report.by_position == []
    for drafted, accepted in ((3, 3), (3, 0), (3, 1), (1, 1)):
        chain = list(range(drafted))
        report.add(Draft([chain]), Verified([0] * (accepted + 1), 0, accepted), [0.5])
    assert report.tokens_per_call == 2.25
    assert report.by_position == [3 / 4, 1 / 2, 1.0]
    assert report.alpha == 0.5

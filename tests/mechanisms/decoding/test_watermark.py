"""The watermark: its lists are random and the key's, its test keeps its level, and it is found where it is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import AutoModelForCausalLM, WatermarkLogitsProcessor

from kvlab.core.errors import ParamsError
from kvlab_mechanisms.decoding.sampler import uniforms
from kvlab_mechanisms.decoding.watermark import Detection, PermutationWatermark, Watermark, WatermarkProcessor, mixed
from refusals import refused
from tiers import examples

pytestmark = pytest.mark.full

VOCABULARY = 8192
MARK = Watermark(key=0x0123456789ABCDEF)


def generated(mark: Watermark, tokens: int, seed: int) -> np.ndarray:
    """A text of a flat model under the watermark, drawn by the law of the marked logits."""
    text = [seed % VOCABULARY] * mark.width
    p = math.exp(mark.delta) * mark.gamma / (math.exp(mark.delta) * mark.gamma + 1 - mark.gamma)
    for u in uniforms(seed, 0, 2 * tokens).reshape(-1, 2):
        green = mark.green(np.arange(VOCABULARY), mark.contexts(np.array(text[-mark.width :])))
        allowed = np.flatnonzero(green == (u[0] < p))
        text.append(int(allowed[int(u[1] * len(allowed))]))
    return np.array(text)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5])
def test_green_shares_are_gamma_and_lists_of_contexts_and_keys_independent(gamma, secure):
    mark = Watermark(7, gamma, secure=secure)
    after = mark.contexts(np.arange(200)[:, None])
    lists = mark.green(np.arange(VOCABULARY), after[:, None])
    spread = (lists.mean(1) - gamma) / math.sqrt(gamma * (1 - gamma) / VOCABULARY)
    assert abs(spread).max() < 4.5 and stats.kstest(spread, "norm").pvalue > 1e-3
    overlaps = np.cov(lists[:60]) / (gamma * (1 - gamma)) * math.sqrt(VOCABULARY)
    assert abs(overlaps[np.triu_indices(60, 1)]).max() < 5
    other = Watermark(8, gamma, secure=secure)
    both = lists[0] & other.green(np.arange(VOCABULARY), other.contexts(np.array([0])))
    assert abs(both.mean() - gamma**2) < 4 * math.sqrt(gamma**2 / VOCABULARY)
    assert (lists == mark.green(np.arange(VOCABULARY), after[:, None])).all()


def test_no_context_is_like_another_and_their_order_counts():
    assert len(np.unique(mixed(np.arange(100_000, dtype=np.uint64)))) == 100_000
    mark = Watermark(3, width=2)
    pairs = np.stack(np.meshgrid(np.arange(300), np.arange(300)), -1).reshape(-1, 2)
    assert len(np.unique(mark.contexts(pairs))) == len(pairs)
    assert (MARK.contexts(np.array([[0]])) != np.uint64(MARK.key)).all()  # token 0 is a context as any other


@pytest.mark.parametrize("width", [1, 3])
def test_a_text_without_the_mark_has_a_normal_z_and_uniform_p_values(width):
    mark = Watermark(99, 0.25, width=width)
    texts = np.random.default_rng(0).integers(0, 50_000, (3000, 400))
    found = [mark.detect(text) for text in texts]
    z = np.array([one.z for one in found])
    assert (
        stats.kstest(z + np.random.default_rng(1).uniform(-0.5, 0.5, 3000) / math.sqrt(400 * 0.1875), "norm").pvalue
        > 1e-3
    )
    assert (np.array([one.p_value for one in found]) < 0.01).mean() < 0.017


def test_false_alarms_at_four_sigma_are_rare():
    """2e5 texts of 50 tokens, hashed at once; the exact tail of the binomial is 3.2e-5 there."""
    texts = np.random.default_rng(2).integers(0, 50_000, (200_000, 51))
    green = MARK.green(texts[:, 1:], MARK.contexts(texts[:, :-1, None])).sum(1)
    z = (green - 25) / math.sqrt(12.5)
    assert (z > 4).mean() <= 1e-4
    assert Detection(0.5, np.arange(50) < 40).z > 4
    assert Detection(0.5, np.arange(50) < 40).p_value == pytest.approx(stats.binom.sf(39, 50, 0.5), rel=1e-9)


def test_two_hundred_tokens_of_a_flat_model_are_found_and_by_this_key_alone():
    texts = [generated(MARK, 200, seed) for seed in range(60)]
    assert all(MARK.detect(text).z > 4 for text in texts)
    others = np.array([Watermark(MARK.key ^ 1).detect(text).z for text in texts])
    assert abs(others.mean()) < 4 / math.sqrt(60) and others.max() < 4
    # power over many texts: each token is green with probability 0.881, so z > 4 fails below 129 of 200
    assert stats.binom.sf(128, 200, 0.8808) > 0.999


def test_repeated_ngrams_count_once():
    loop = np.tile([17, 23], 100)
    assert MARK.detect(loop).scored == 2
    worst = max(Watermark(key).detect(loop).z for key in range(200))
    assert worst < 2
    text = generated(MARK, 30, 5)
    twice = np.concatenate([text, text])
    assert MARK.detect(twice).scored <= MARK.detect(text).scored + 1


def test_short_texts_are_not_scored_and_no_bias_changes_nothing():
    for length in range(4):
        found = Watermark(1, width=3).detect(range(length))
        assert found.scored == 0 and math.isnan(found.z) and found.p_value == 1 and math.isnan(found.best_window()[2])
    logits, ids = torch.randn(2, 50), torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(Watermark(1, delta=0).marked(logits, ids), logits)
    assert torch.equal(Watermark(1, width=3).marked(logits, ids), logits)
    for wrong in ({"gamma": 0}, {"gamma": 1}, {"width": 0}, {"delta": math.inf}):
        with pytest.raises(ParamsError):
            Watermark(1, **wrong)


def test_a_marked_part_is_found_inside_a_text():
    chance = np.random.default_rng(3)
    text = np.concatenate(
        [chance.integers(0, VOCABULARY, 300), generated(MARK, 80, 1), chance.integers(0, VOCABULARY, 300)]
    )
    begin, end, z = MARK.detect(text).best_window()
    assert abs(begin - 300) < 25 and abs(end - 380) < 25 and z > 5


@examples(50)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**64 - 1), st.booleans())
def test_what_is_raised_is_what_is_counted(rows, width, key, secure):
    mark = Watermark(key, 0.3, 1.5, width, secure)
    ids = torch.randint(0, 90, (rows, 5), generator=torch.Generator().manual_seed(key % 2**31))
    raised = mark.marked(torch.zeros(rows, 90), ids) > 0
    for row in range(rows):
        for token in (0, 41, 89):
            assert mark.detect([*ids[row, -width:].tolist(), token]).green.tolist() == [bool(raised[row, token])]


def test_it_marks_what_transformers_generates(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(0)
    prompt = torch.randint(1, 320, (4, 6))
    how = {
        "max_new_tokens": 120,
        "do_sample": True,
        "temperature": 2.0,
        "top_k": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    bare = model.generate(prompt, **how)
    marked = model.generate(prompt, logits_processor=[WatermarkProcessor(Watermark(5, delta=4.0))], **how)
    assert all(Watermark(5).detect(row[6:]).z > 4 for row in marked.numpy())
    assert all(Watermark(5).detect(row[6:]).z < 4 for row in bare.numpy())


def test_lists_by_permutation_are_those_of_transformers():
    ids = torch.randint(0, 300, (6, 9), generator=torch.Generator().manual_seed(0))
    theirs = WatermarkLogitsProcessor(300, "cpu", greenlist_ratio=0.25, bias=2.5)
    ours = PermutationWatermark(key=15485863, gamma=0.25, delta=2.5, vocabulary=300)
    logits = torch.randn(6, 300)
    assert torch.equal(ours.marked(logits, ids), theirs(ids, logits))
    row = ids[0].tolist()
    greens = [bool(theirs(torch.tensor([[a]]), torch.zeros(1, 300))[0, b] > 0) for a, b in itertools.pairwise(row)]
    assert ours.detect(row).green.tolist() == greens
    with refused(ParamsError, "params.permutation-lists"):
        PermutationWatermark(key=1, width=2)

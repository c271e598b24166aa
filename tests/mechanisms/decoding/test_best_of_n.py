"""Parallel samples: each what it would be alone, one prefix, an order that its parts explain, the law of the best."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from kvlab.cache.hf.kv_cache import KVCache
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CapabilityError, ParamsError
from kvlab_mechanisms.decoding.best_of_n import SharedPrefixCache, best_of_n, best_token, candidates, ranked
from kvlab_mechanisms.decoding.law import Sampling
from kvlab_mechanisms.decoding.speculate import plain
from refusals import refused

pytestmark = pytest.mark.nightly

PROMPT = list(range(30, 70))
OWN = Sampling(0.9, 40, seed=10)
P = np.array([0.4, 0.25, 0.2, 0.1, 0.05])


@pytest.fixture(scope="module")
def found(model):
    return best_of_n(model, PROMPT, 6, 12, OWN)


def test_every_sample_is_what_it_is_alone(model, found):
    alone = [plain(model, PROMPT, 12, replace(OWN, seed=OWN.seed + i)) for i in range(6)]
    assert sorted(one.tokens for one in found.samples) == sorted(alone)


@torch.no_grad()
def test_scores_are_made_of_their_parts(model, found):
    for one in found.samples:
        ids = torch.tensor([PROMPT + one.tokens])
        told = model(ids).logits[0, len(PROMPT) - 1 : -1].double().log_softmax(-1)
        log_prob = float(told.gather(1, ids[0, len(PROMPT) :, None]).sum())
        assert one.log_prob == pytest.approx(log_prob, abs=1e-3)
        assert one.score == pytest.approx(one.log_prob / 12)
    scores = [one.score for one in found.samples]
    assert scores == sorted(scores, reverse=True)


def test_one_prefix_is_held_once(model, found):
    token = 2 * 3 * 2 * 32 * 4  # K and V, layers, heads, dimensions, bytes
    assert found.prefix_bytes == 39 * token
    assert found.nbytes == (39 + 6 * 12) * token
    assert found.independent_bytes == 6 * (39 + 12) * token
    one = best_of_n(model, PROMPT, 1, 12, OWN)
    assert one.samples[0].tokens == plain(model, PROMPT, 12, OWN)
    assert one.nbytes == one.independent_bytes


def test_samples_end_at_a_stop_and_lengths_are_paid_for(model, found):
    stop = [found.samples[0].tokens[4], found.samples[1].tokens[7]]
    ended = best_of_n(model, PROMPT, 6, 12, OWN, stop=stop, alpha=0.5)
    for one in ended.samples:
        assert not set(one.tokens[:-1]) & set(stop)
        assert one.score == pytest.approx(one.log_prob / len(one.tokens) ** 0.5)
        assert any(one.tokens == whole.tokens[: len(one.tokens)] for whole in found.samples)
    assert min(len(one.tokens) for one in ended.samples) < 12


def test_samples_go_on_from_a_coded_prefix(model, found):
    coded = KVCache(model, named_recipe("hadamard", bits=8))
    near = best_of_n(model, PROMPT, 6, 3, OWN, cache=coded)
    assert {tuple(one.tokens) for one in near.samples} & {tuple(one.tokens[:3]) for one in found.samples}
    assert coded.nbytes < near.prefix_bytes
    with refused(CapabilityError, "capability.no-crop"):
        SharedPrefixCache.of(coded).crop(-1)
    with refused(CapabilityError, "capability.prefix-rows"):
        SharedPrefixCache([(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))])
    with pytest.raises(ParamsError):
        best_of_n(model, PROMPT[:1], 2, 3, OWN)


def test_the_order_takes_unlike_samples_earlier():
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.01], [0.0, 1.0]])
    scores = [-1.0, -1.1, -1.5]
    assert ranked(scores, embeddings, 0.0) == [0, 1, 2]
    assert ranked(scores, embeddings, 1.0) == [0, 2, 1]
    assert ranked([-2.0, -2.0], embeddings[:2], 0.0) == [0, 1]


@pytest.mark.parametrize("n", [2, 8])
def test_the_best_of_n_draws_has_its_law(n):
    rows = 20_000
    taken = best_token(torch.from_numpy(np.log(P)).expand(rows, 5), n, Sampling())
    above = np.concatenate([[0], np.cumsum(P)])
    want = (1 - above[:-1]) ** n - np.maximum(1 - above[1:], 0) ** n
    counts, expected = np.bincount(taken, minlength=5), rows * want
    few = expected < 5
    cells = [np.append(x[~few], x[few].sum()) if few.any() else x for x in (counts, expected)]
    if few.any() and expected[few].sum() < 1:
        cells = [x[:-1] for x in cells]
        cells[1] = cells[1] * cells[0].sum() / cells[1].sum()
    assert stats.chisquare(*cells).pvalue > 1e-3


def test_candidates_with_replacement_are_independent_draws_of_the_law():
    rows = 20_000
    drawn = candidates(torch.from_numpy(np.log(P)).expand(rows, 5), 3, Sampling())
    assert stats.chisquare(np.bincount(drawn.ravel(), minlength=5), 3 * rows * P).pvalue > 1e-3
    pairs = np.bincount(5 * drawn[:, 0] + drawn[:, 2], minlength=25)
    assert stats.chisquare(pairs, rows * np.outer(P, P).ravel()).pvalue > 1e-3


def test_candidates_without_replacement_are_drawn_one_after_the_other():
    rows = 20_000
    drawn = candidates(torch.from_numpy(np.log(P)).expand(rows, 5), 2, Sampling(), replacement=False)
    pairs = list(itertools.permutations(range(5), 2))
    want = np.array([P[a] * P[b] / (1 - P[a]) for a, b in pairs])
    counts = np.array([((drawn == pair).all(1)).sum() for pair in pairs])
    assert counts.sum() == rows
    assert stats.chisquare(counts, rows * want).pvalue > 1e-3
    with refused(ParamsError, "params.too-few-candidates", 3, 2):
        candidates(torch.zeros(1, 5) + torch.arange(5.0), 3, Sampling(top_k=2), replacement=False)


def test_a_batch_of_rows_is_its_rows():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    for replacement in (True, False):
        together = candidates(logits, 5, OWN, 3, replacement=replacement)
        single = [
            candidates(logits[i : i + 1], 5, replace(OWN, seed=10 + i), 3, replacement=replacement)[0] for i in range(4)
        ]
        assert (together == np.stack(single)).all()

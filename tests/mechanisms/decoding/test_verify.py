"""Exact verification: the law of what comes out, how much is accepted, how many tokens a call makes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvlab.core.errors import NonFinite
from kvlab_mechanisms.decoding.law import Sampling
from kvlab_mechanisms.decoding.sampler import DRAFTER, uniforms
from kvlab_mechanisms.decoding.verify import Draft, TargetLogits, draws_of, inverse, residual, verify
from tiers import examples

pytestmark = pytest.mark.nightly

VOCABULARY, DEPTH = 4, 2
RUNS = 10_000


@dataclass
class Table:
    """A model that is a table: the law after each text of fewer than `DEPTH` + 1 tokens."""

    laws: dict[tuple[int, ...], torch.Tensor]

    @classmethod
    def random(cls, seed: int, only: tuple[int, ...] = tuple(range(VOCABULARY)), sharp: float = 1.5) -> Table:
        chance, laws = np.random.default_rng(seed), {}
        for length in range(DEPTH + 1):
            for text in itertools.product(range(VOCABULARY), repeat=length):
                p = np.zeros(VOCABULARY)
                p[list(only)] = np.exp(sharp * chance.normal(size=len(only)))
                laws[text] = torch.from_numpy(p / p.sum())
        return cls(laws)

    def joint(self) -> np.ndarray:
        """The law of two tokens."""
        return np.array(
            [self.laws[()][a] * self.laws[a,][b] for a, b in itertools.product(range(VOCABULARY), repeat=2)]
        )


@dataclass
class OnChains:
    """The table as a target of some chains."""

    table: Table
    chains: list[list[int]]

    def row(self, chain, depth):
        return self.table.laws[tuple(self.chains[chain][:depth])]

    def at(self, chain, depth, token):
        return float(self.row(chain, depth)[token])


def drafted(table: Table, chains: int, u: np.ndarray) -> Draft:
    """Chains that each are drawn from the table."""
    tokens = []
    for numbers in u.reshape(chains, DEPTH):
        text: list[int] = []
        for number in numbers:
            text.append(inverse(table.laws[tuple(text)], number))
        tokens.append(text)
    return Draft(tokens, lambda chain, depth: table.laws[tuple(tokens[chain][:depth])])


def best(table: Table, chains: int) -> Draft:
    """The likeliest first tokens, each with its likeliest successor: no draw at all."""
    firsts = table.laws[()].argsort(descending=True)[:chains].tolist()
    return Draft([[first, int(table.laws[first,].argmax())] for first in firsts])


def two_tokens(p: Table, draft_of, run: int) -> list[int]:
    """Two tokens of speculative decoding, by as many calls as that takes; a second call drafts nothing."""
    draft = draft_of(run)
    made = verify(draft, OnChains(p, draft.tokens), draws_of(run, 0)).tokens
    if len(made) == 1:
        after = Table({(): p.laws[made[0],]})
        made += verify(Draft([[]]), OnChains(after, [[]]), draws_of(run, 1)).tokens
    return made[:2]


DRAFTERS = {
    "sampled": lambda q, chains: lambda run: drafted(q, chains, uniforms(run, 0, chains * DEPTH, DRAFTER)),
    "deterministic": lambda q, chains: lambda run: best(q, chains),
}


@pytest.mark.parametrize(
    ("kind", "chains", "only"),
    [
        ("sampled", 1, (0, 1, 2, 3)),
        ("sampled", 3, (0, 3)),
        ("deterministic", 1, (0, 3)),
        ("deterministic", 3, (0, 1, 2, 3)),
    ],
)
def test_two_tokens_have_the_targets_law(kind, chains, only):
    p, q = Table.random(0), Table.random(1, only)
    if kind == "deterministic" and len(only) < chains:
        q = Table.random(2)
    draft_of = DRAFTERS[kind](q, chains)
    made = np.array([two_tokens(p, draft_of, run) for run in range(RUNS)])
    counts = np.bincount(VOCABULARY * made[:, 0] + made[:, 1], minlength=VOCABULARY**2)
    assert stats.chisquare(counts, RUNS * p.joint()).pvalue > 1e-3


def test_a_draft_of_what_cannot_be_is_never_taken():
    p, q = Table.random(0, (0, 1)), Table.random(1, (2, 3))
    made = [verify(d, OnChains(p, d.tokens), draws_of(run, 0)) for run in range(4000) for d in [best(q, 2)]]
    assert {found.accepted for found in made} == {0}
    first = np.bincount([found.tokens[0] for found in made], minlength=4)
    assert stats.chisquare(first[:2], 4000 * p.laws[()][:2].numpy()).pvalue > 1e-3


def test_nor_is_a_draw_from_what_cannot_be():
    p, q = Table.random(0, (0, 1)), Table.random(1, (2, 3))
    drafts = (drafted(q, 3, uniforms(run, 0, 3 * DEPTH, DRAFTER)) for run in range(4000))
    made = [verify(d, OnChains(p, d.tokens), draws_of(run, 0)) for run, d in enumerate(drafts)]
    assert {(found.accepted, len(found.tokens)) for found in made} == {(0, 1)}
    first = np.bincount([found.tokens[0] for found in made], minlength=4)
    assert stats.chisquare(first[:2], 4000 * p.laws[()][:2].numpy()).pvalue > 1e-3


def test_a_drafter_that_is_the_target_is_always_accepted_and_gets_one_token_more():
    """And that token has the law of the target after both."""
    p, last = Table.random(0), []
    for run in range(4000):
        draft = drafted(p, 1, uniforms(run, 0, DEPTH, DRAFTER))
        found = verify(draft, OnChains(p, draft.tokens), draws_of(run, 0))
        assert (found.accepted, found.tokens[:DEPTH]) == (DEPTH, draft.tokens[0])
        last.append(found.tokens)
    often = max({tuple(text[:2]) for text in last}, key=lambda pair: sum(tuple(text[:2]) == pair for text in last))
    counts = np.bincount([text[2] for text in last if tuple(text[:2]) == often], minlength=VOCABULARY)
    assert stats.chisquare(counts, counts.sum() * p.laws[often].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_acceptance_is_one_less_the_total_variation(seed):
    p, q = Table.random(2 * seed), Table.random(2 * seed + 1)
    alpha = float(torch.minimum(p.laws[()], q.laws[()]).sum())
    drafts = (drafted(q, 1, uniforms(run, 0, DEPTH, DRAFTER)) for run in range(8000))
    rate = np.mean([verify(d, OnChains(p, d.tokens), draws_of(run, 0)).accepted > 0 for run, d in enumerate(drafts)])
    assert abs(rate - alpha) < 3.3 * np.sqrt(alpha * (1 - alpha) / 8000)


@examples(100)
@given(st.integers(1, 4), st.integers(0, 6), st.integers(2, 12), st.integers(0, 10**6), st.booleans())
def test_a_call_makes_one_to_n_plus_one_tokens(chains, depth, vocabulary, seed, sampled):
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (chains, depth), generator=chance).tolist()
    of_prefix: dict[tuple, torch.Tensor] = {}  # chains that share a prefix are at one node
    logits = torch.zeros(chains, depth + 1, vocabulary)
    for chain, i in itertools.product(range(chains), range(depth + 1)):
        row = 2 * torch.randn(vocabulary, generator=chance)
        logits[chain, i] = of_prefix.setdefault(tuple(tokens[chain][:i]), row)
    q = 2 * torch.randn(chains, max(depth, 1), vocabulary, generator=chance).double().softmax(-1)
    own = [Sampling(), Sampling(0), Sampling(0.7, 3, 0.9, 0.05, 1.2)][seed % 3]
    rows = TargetLogits(logits, own, chains=tokens)
    found = verify(Draft(tokens, (lambda *place: q[place]) if sampled else None), rows, draws_of(seed, 0))
    assert len(found.tokens) == found.accepted + 1 <= depth + 1
    assert found.tokens[: found.accepted] == tokens[found.chain][: found.accepted]
    assert all(rows.row(found.chain, i)[token] > 0 for i, token in enumerate(found.tokens))


def test_without_temperature_only_the_greedy_path_comes_out():
    logits = torch.randn(3, 3, 9, generator=torch.Generator().manual_seed(0))
    logits[1:, 0] = logits[0, 0]  # one node
    best = logits.argmax(-1).tolist()
    chains = [[best[0][0] ^ 1, 0], [best[0][0], best[1][1] ^ 1], [best[0][0], best[2][1]]]
    logits[2, 1] = logits[1, 1]
    chains[2][1] = best[1][1]
    found = verify(Draft(chains), TargetLogits(logits, Sampling(0), chains=chains), draws_of(0, 0))
    assert found.tokens == [best[0][0], best[1][1], int(logits[2, 2].argmax())]
    assert (found.chain, found.accepted) == (2, 2)


def test_rows_agree_with_themselves_and_see_the_draft_in_their_penalty():
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(1))
    plain = TargetLogits(logits, Sampling(0.7))
    assert all(plain.at(0, 1, x) == pytest.approx(float(plain.row(0, 1)[x]), rel=1e-12) for x in range(50))
    own = Sampling(repetition_penalty=1.5)
    free, held = TargetLogits(logits, own), TargetLogits(logits, own, text=[3], chains=[[7, 8]])
    assert torch.equal(free.row(0, 0), plain.row(0, 0)) is False
    assert held.row(0, 0)[7] / held.row(0, 0)[9] == pytest.approx(float(free.row(0, 0)[7] / free.row(0, 0)[9]))
    assert held.row(0, 1)[7] < free.row(0, 1)[7]


def test_what_is_left_is_a_law():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    assert torch.allclose(residual(p, q, 2), torch.tensor([0.75, 0.25, 0]).double())
    assert torch.allclose(residual(p, None, 0), torch.tensor([0, 0.6, 0.4]).double())
    assert torch.equal(residual(p, p, 0), p)  # only rounding leads there


def test_logits_that_are_no_law_are_refused():
    for broken in ([-torch.inf, -torch.inf], [0.0, torch.nan], [0.0, torch.inf]):
        for own in (Sampling(), Sampling(top_k=1)):
            with pytest.raises(NonFinite):
                verify(Draft([[]]), TargetLogits(torch.tensor([[broken]]), own), draws_of(0, 0))

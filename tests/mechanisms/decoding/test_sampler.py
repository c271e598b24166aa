"""The sampler: equal to transformers' chain, draws by its law, nothing in a batch changes anything else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvlab.core.errors import NonFinite, ParamsError, UnknownName
from kvlab_mechanisms.decoding.law import ORDERS, Sampling, law
from kvlab_mechanisms.decoding.sampler import (
    DRAFTER,
    MASK,
    TARGET,
    LawProcessor,
    SamplerLogitsProcessor,
    drawn,
    philox,
    sample,
    uniform,
    uniforms,
)
from kvlab_mechanisms.decoding.speculate import plain
from refusals import refused
from tiers import examples

pytestmark = pytest.mark.full

SEEN = torch.tensor([0, 2, 2, 5])
GRID = [
    Sampling(*values)
    for values in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 5, 50, 4000), (0.05, 0.5, 0.9, 1.0), (0, 0.05, 0.5), (1, 1.3)
    )
]


def chain(own: Sampling, order: str = "hf") -> LogitsProcessorList:
    """transformers' own filters in the order of an engine."""
    warpers = {
        "top_k": lambda: TopKLogitsWarper(own.top_k) if own.top_k else None,
        "top_p": lambda: TopPLogitsWarper(own.top_p) if own.top_p < 1 else None,
        "min_p": lambda: MinPLogitsWarper(own.min_p) if own.min_p else None,
    }
    made = [
        RepetitionPenaltyLogitsProcessor(float(own.repetition_penalty)),
        TemperatureLogitsWarper(own.temperature) if own.temperature != 1 else None,
        *(warpers[name]() for name in ORDERS[order]),
    ]
    return LogitsProcessorList([one for one in made if one])


def logits_of(size: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Continuous, or of few values so that most of them tie."""
    z = 3 * torch.randn(1, size, generator=torch.Generator().manual_seed(seed + size), dtype=torch.float64)
    return {"continuous": z, "tied": z.round(), "flat": torch.zeros_like(z)}[kind]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["continuous", "tied", "flat"])
@pytest.mark.parametrize("size", [7, 64, 512])
def test_probabilities_are_those_of_transformers_chain(size, kind, order):
    z = logits_of(size, kind)
    far = [
        (own, gap)
        for own in GRID
        for want in [chain(own, order)(SEEN[None], z).softmax(-1)]
        if (gap := apart(law(z, [own], [SEEN], order).dense(size)[0], want[0], penalised(z, own)[0])) > 1e-6
    ]
    assert far == []


def penalised(z: torch.Tensor, own: Sampling) -> torch.Tensor:
    return RepetitionPenaltyLogitsProcessor(float(own.repetition_penalty))(SEEN[None], z)


def apart(p: torch.Tensor, q: torch.Tensor, z: torch.Tensor) -> float:
    """Greatest difference, where equals may change places: a sort decides which of them a nucleus keeps."""
    p, q = (values[np.lexsort((values, z))] for values in (p.numpy(), q.numpy()))
    return float(np.abs(p - q).max())


@pytest.mark.parametrize("own", GRID[:: len(GRID) // 24])
def test_so_they_are_in_float32(own):
    z = logits_of(512, "continuous").float()
    want = chain(own)(SEEN[None], z).softmax(-1)
    assert (law(z, [own], [SEEN]).dense(512) - want).abs().max() < 1e-6


@pytest.mark.parametrize(
    "own", [Sampling(0.8, 50, 0.9, 0.05, 1.1), Sampling(1.0, 0, 0.7), Sampling(1.3), Sampling(0.9, 3)]
)
def test_draws_follow_the_law(own):
    z = logits_of(80, "continuous")
    found = law(z, [own])
    u = uniforms(seed=5, step=0, count=100_000)
    tokens = drawn(type(found)(np.repeat(found.ids, len(u), 0), np.repeat(found.p, len(u), 0)), u)
    p = found.dense(80)[0].numpy()
    counts = np.bincount(tokens, minlength=80)
    assert counts[p == 0].sum() == 0
    large = p * len(u) > 5
    cells, expected = counts[large], len(u) * p[large]
    if (~large).any():
        cells, expected = np.append(cells, counts[~large].sum()), np.append(expected, len(u) * p[~large].sum())
    assert stats.chisquare(cells[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_steps_of_a_request_are_independent_draws():
    z, own = torch.log(torch.tensor([[0.5, 0.3, 0.2]])), Sampling(seed=11)
    tokens = sample(z.expand(20_000, 3), [own] * 20_000, range(20_000)).numpy()
    pairs = np.bincount(3 * tokens[:-1:2] + tokens[1::2], minlength=9)
    p = np.array([0.5, 0.3, 0.2])
    assert stats.chisquare(pairs, 10_000 * np.outer(p, p).ravel()).pvalue > 1e-3


def mixed_batch(count: int, size: int = 300) -> tuple[torch.Tensor, list[Sampling], list[int], list[torch.Tensor]]:
    chance = torch.Generator().manual_seed(count)
    kinds = [Sampling(0), Sampling(), Sampling(0.8, 50, 0.9, 0.05, 1.1), Sampling(2, 0, 0.5), Sampling(1, 0, 1, 0.2)]
    settings = [Sampling(**{**vars(kinds[i % len(kinds)]), "seed": 100 + i}) for i in range(count)]
    seen = [torch.randint(0, size, (i,), generator=chance) for i in range(count)]
    return 2 * torch.randn(count, size, generator=chance), settings, list(range(count)), seen


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_of_a_batch_is_what_it_is_alone_wherever_it_stands(order):
    z, settings, steps, seen = mixed_batch(23)
    together = sample(z, settings, steps, seen, order)
    alone = [int(sample(z[i : i + 1], [settings[i]], [steps[i]], [seen[i]], order)) for i in range(23)]
    assert together.tolist() == alone
    turned = torch.randperm(23, generator=torch.Generator().manual_seed(0)).tolist()
    moved = sample(z[turned], *([own[i] for i in turned] for own in (settings, steps, seen)), order)
    assert moved.tolist() == together[turned].tolist()


@examples(50)
@given(st.integers(2, 60), st.integers(0, 10**6))
def test_one_candidate_or_no_temperature_is_argmax(size, seed):
    z = torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    for own in (Sampling(top_k=1), Sampling(0), Sampling(1e-9), Sampling(top_p=1e-9), Sampling(0, 5, 0.5, 0.1)):
        assert sample(z, [own], [seed]) == z.argmax()


@examples(50)
@given(st.integers(0, 10**6))
def test_supports_nest_as_the_filters_open(seed):
    z = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)).mul(2).round()  # ties too

    def support(**changes) -> set[int]:
        found = law(z, [Sampling(**changes)])
        return set(found.ids[found.p > 0].tolist())

    for name, values in {
        "top_k": range(1, 41),
        "top_p": np.linspace(0.05, 1, 30),
        "min_p": np.linspace(0.95, 0, 30),
    }.items():
        supports = [support(**{name: value}) for value in values]
        assert all(a <= b for a, b in itertools.pairwise(supports))


def test_a_penalty_meets_an_id_once_and_top_p_still_counts_after_top_k():
    z = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    once = law(z, [Sampling(repetition_penalty=2.0)], [torch.tensor([0, 1])]).dense(4)
    often = law(z, [Sampling(repetition_penalty=2.0)], [torch.tensor([1, 0, 0, 1, 0])]).dense(4)
    assert torch.equal(once, often)
    assert torch.allclose(once, torch.tensor([[1.0, -2.0, 0.5, 0.0]]).double().softmax(-1))
    flat = torch.arange(100.0)[None] / 50  # the 10 most likely have much less than 0.9 of all mass
    assert (law(flat, [Sampling(top_k=10, top_p=0.9)]).p > 0).sum() == 9


def test_a_single_finite_logit_is_drawn_and_what_is_no_law_is_refused():
    z = torch.full((1, 9), -torch.inf)
    z[0, 4] = -3.0
    assert all(sample(z, [own], [0]) == 4 for own in GRID)
    for broken in (
        torch.full((1, 9), -torch.inf),
        z.masked_fill(z == -3, torch.nan),
        z.masked_fill(z == -3, torch.inf),
    ):
        for own in (Sampling(), Sampling(0), Sampling(top_k=3), Sampling(top_p=0.5)):
            with pytest.raises(NonFinite):
                law(broken, [own])
    with pytest.raises(UnknownName):
        law(z, [Sampling()], order="llama")


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 1}, {"repetition_penalty": 0}]
)
def test_settings_outside_their_range_are_named(wrong):
    with refused(ParamsError, None, *wrong, *wrong.values()):
        Sampling(**wrong)


# Random numbers: known answers, one alone and in an array, uniformity, independence of streams.

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


# In transformers: generate writes what the sampler draws, alone and in a padded batch.

PROMPTS = [list(range(20, 30)), list(range(50, 57)), [7, 9]]
SETTINGS = [Sampling(0.8, 20, 0.9, 0.02, seed=1), Sampling(seed=2), Sampling(0)]
HOW = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_padded_batch_writes_what_each_prompt_writes_alone(model, do_sample):
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    how = HOW | {"do_sample": do_sample} | ({"top_k": 0} if do_sample else {})
    written = model.generate(ids, attention_mask=mask, logits_processor=[SamplerLogitsProcessor(SETTINGS)], **how)
    for row, prompt, own in zip(written, PROMPTS, SETTINGS, strict=True):
        alone = model.generate(torch.tensor([prompt]), logits_processor=[SamplerLogitsProcessor([own])], **how)
        assert row[width:].tolist() == alone[0, len(prompt) :].tolist() == plain(model, prompt, 20, own)


def test_the_filters_alone_leave_transformers_to_draw(model):
    own = Sampling(0.8, 20, 0.9, 0.02, 1.1)
    torch.manual_seed(3)
    ours = model.generate(
        torch.tensor(PROMPTS[:1]), do_sample=True, top_k=0, logits_processor=[LawProcessor([own])], **HOW
    )
    torch.manual_seed(3)
    theirs = model.generate(
        torch.tensor(PROMPTS[:1]), do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02,
        repetition_penalty=1.1, **HOW,
    )  # fmt: skip
    assert torch.equal(ours, theirs)

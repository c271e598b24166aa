"""Heads: their formula, that training makes them draft better, and that what is written stays the target's."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tiny
from kvlab.core.errors import ModelError
from kvlab_mechanisms.decoding.heads import HeadDrafter, Heads, fit_heads, matrices
from kvlab_mechanisms.decoding.law import Sampling
from kvlab_mechanisms.decoding.speculate import plain, speculate
from refusals import refused

pytestmark = pytest.mark.full

PROMPT = list(range(5, 25))


PROMPTS = [torch.randint(1, 320, (8,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.write_model(tmp_path_factory.mktemp("model"), "llama", seed=2)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def trained(model):
    """On greedy texts of a random model: there is nothing to learn in them but the texts themselves."""
    texts = [torch.tensor(prompt + plain(model, prompt, 40, Sampling(0))) for prompt in PROMPTS]
    return fit_heads(model, texts, places=3, steps=300, rate=3e-3), texts


def test_a_head_is_its_formula():
    heads = Heads(4, 2)
    torch.nn.init.normal_(heads.layers[1].weight)
    torch.nn.init.normal_(heads.layers[1].bias)
    hidden, e = torch.randn(4), torch.randn(2, 4)
    inner = heads.layers[1].weight @ torch.cat([hidden, e[0], e[1]]) + heads.layers[1].bias
    assert torch.allclose(heads(hidden, e), hidden + inner * torch.sigmoid(inner), atol=1e-6)
    assert torch.equal(heads(hidden, e[:1]), hidden)  # untrained: the model itself


def test_training_lowers_the_loss_and_raises_what_is_accepted(model, trained):
    heads, texts = trained
    with torch.no_grad():
        hidden = model(texts[0][None], output_hidden_states=True).hidden_states[-1][0]
        before, after = (one.loss(hidden, texts[0], *matrices(model)) for one in (Heads(128, 3), heads))
    assert after < 0.5 * before

    def per_call(of: Heads, chains: int) -> float:
        drafters = [HeadDrafter(model, of, Sampling(0), chains) for _ in PROMPTS[:5]]
        both = zip(drafters, PROMPTS, strict=False)
        return sum(speculate(model, one, prompt, 40, 3, Sampling(0)).report.tokens_per_call for one, prompt in both) / 5

    assert per_call(heads, 1) > 1.2 * per_call(Heads(128, 3), 1)
    assert per_call(heads, 3) >= per_call(heads, 1)


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("which", ["trained", "untrained"])
def test_heads_never_change_a_greedy_text(model, trained, chains, which):
    heads = trained[0] if which == "trained" else Heads(128, 3)
    drafter = HeadDrafter(model, heads, Sampling(0), chains)
    assert speculate(model, drafter, PROMPT, 30, 3, Sampling(0)).tokens == plain(model, PROMPT, 30, Sampling(0))


def test_sampled_chains_are_draws_of_their_rows(model, trained):
    drafter = HeadDrafter(model, trained[0], Sampling(seed=4), chains=2)
    drafter.observe(torch.randn(128, generator=torch.Generator().manual_seed(0)))
    draft = drafter.draft(PROMPT, 5, 0)
    assert [len(chain) for chain in draft.tokens] == [3, 3]  # no longer than there are heads
    assert all(draft.q(h, i)[draft.tokens[h][i]] > 0 for h in range(2) for i in range(3))
    assert torch.equal(draft.q(0, 0), draft.q(1, 0))
    written = speculate(
        model, drafter := HeadDrafter(model, trained[0], Sampling(seed=4), 2), PROMPT, 12, 3, drafter.own
    )
    assert len(written.tokens) == 12


def test_heads_go_through_a_file(trained, tmp_path):
    trained[0].save(tmp_path / "heads.safetensors")
    again = Heads.load(tmp_path / "heads.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trained[0].parameters(), strict=True))
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with refused(ModelError, "model.no-heads", tmp_path / "other.safetensors"):
        Heads.load(tmp_path / "other.safetensors")

"""Decoding with a drafter: draft, one forward of the target over the draft, verify, cut both caches back.

The loop of Leviathan et al. 2023 (2211.17192, section 2.3) over a transformers model and any `Drafter`. The drafter
decides how fast it goes, never what is written: the verifier's law is the target's, and at temperature 0 the tokens are
those of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from kvlab_mechanisms.decoding.law import Sampling
from kvlab_mechanisms.decoding.sampler import sample
from kvlab_mechanisms.decoding.verify import Draft, TargetLogits, Verified, draws_of, verify


class Drafter(Protocol):
    """What proposes tokens."""

    cache: Cache
    """What the target runs with; attention sees exact K and V in it."""

    def draft(self, text: Sequence[int], tokens: int, step: int) -> Draft:
        """Chains of so many tokens after a text whose last token is not yet in the cache."""

    def observe(self, hidden: Tensor) -> None:
        """The target's last hidden state [width] where its call ended."""


@dataclass
class SpeculationReport:
    """What calls of the target made, counted.

    Attributes
    ----------
    drafted, accepted : list of int
        Tokens of each call.
    overlaps : list of float
        1 - TV(p, q) at each drafted place that was verified, where the drafter has a law and it was asked for.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)

    def add(self, draft: Draft, found: Verified, overlaps: Sequence[float]) -> None:
        """One call."""
        self.drafted.append(len(draft.tokens[0]))
        self.accepted.append(found.accepted)
        self.overlaps += overlaps

    @property
    def tokens_per_call(self) -> float:
        """Accepted tokens and one more: the acceptance length; NaN before the first call."""
        return sum(self.accepted) / len(self.accepted) + 1 if self.accepted else float("nan")

    @property
    def alpha(self) -> float:
        """The mean of `overlaps`: the acceptance that is to be expected of one token."""
        return sum(self.overlaps) / len(self.overlaps) if self.overlaps else float("nan")

    @property
    def by_position(self) -> list[float]:
        """Of the calls that came to a place of the draft, the share that accepted it."""
        both = list(zip(self.drafted, self.accepted, strict=True))
        rates = []
        for place in range(max(self.drafted, default=0)):
            came = [accepted > place for drafted, accepted in both if drafted > place and accepted >= place]
            rates.append(sum(came) / len(came) if came else float("nan"))
        return rates


@dataclass
class SpeculatedText:
    """Tokens that follow a prompt, and how they came."""

    tokens: list[int]
    report: SpeculationReport


@torch.no_grad()
def speculate(
    model: nn.Module, drafter: Drafter, prompt: Sequence[int], tokens: int, draft: int, own: Sampling, *, measure=False
) -> SpeculatedText:
    """Tokens after a prompt, drafted and verified.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The target.
    drafter : Drafter
        Its cache is empty.
    prompt : sequence of int
        At least two tokens.
    tokens : int
        To be written.
    draft : int
        Tokens of a draft, at most.
    measure : bool
        Also compute the overlap of p and q wherever a drafted token is verified: two sums over the vocabulary each.
    """
    text, report, cache = list(prompt), SpeculationReport(), drafter.cache
    end = len(text) + tokens
    drafter.observe(_forward(model, [text[:-1]], cache)[1][0, -1])
    while len(text) < end:
        step = len(text) - len(prompt)
        offer = drafter.draft(text, min(draft, end - len(text) - 1), step)
        found, rows, hidden = _call(model, cache, text, offer, own, step)
        report.add(offer, found, _overlaps(offer, rows, found) if measure else ())
        drafter.observe(hidden)
        text += found.tokens
    return SpeculatedText(text[len(prompt) :], report)


def _call(
    model: nn.Module, cache: Cache, text: Sequence[int], offer: Draft, own: Sampling, step: int
) -> tuple[Verified, TargetLogits, Tensor]:
    """One forward of the target; its cache then ends before the last token that was made."""
    chains, drafted = offer.tokens, len(offer.tokens[0])
    if len(chains) > 1:
        cache.batch_repeat_interleave(len(chains))
    logits, hidden = _forward(model, [[text[-1], *chain] for chain in chains], cache)
    rows = TargetLogits(logits, own, text, chains)
    found = verify(offer, rows, draws_of(own.seed, step))
    if len(chains) > 1:
        cache.batch_select_indices(torch.tensor([found.chain], device=logits.device))
    if found.accepted < drafted:
        cache.crop(found.accepted - drafted)
    return found, rows, hidden[found.chain, found.accepted]


def _forward(model: nn.Module, ids: list[list[int]], cache: Cache) -> tuple[Tensor, Tensor]:
    """Logits [rows, tokens, vocabulary] and last hidden states of tokens that a cache takes up."""
    given = torch.tensor(ids, device=model.device)
    output = model(given, past_key_values=cache, use_cache=True, output_hidden_states=True)
    return output.logits, output.hidden_states[-1]


def _overlaps(offer: Draft, rows: TargetLogits, found: Verified) -> list[float]:
    if offer.q is None:
        return []
    places = range(min(found.accepted + 1, len(offer.tokens[0])))
    return [float(torch.minimum(rows.row(found.chain, i), offer.q(found.chain, i)).sum()) for i in places]


@torch.no_grad()
def plain(model: nn.Module, prompt: Sequence[int], tokens: int, own: Sampling, cache: Cache | None = None) -> list[int]:
    """The same without a drafter, one forward a token: what `speculate` is held against."""
    text, cache = list(prompt), DynamicCache(config=model.config) if cache is None else cache
    new = text
    for step in range(tokens):
        logits = _forward(model, [new], cache)[0][:, -1]
        new = sample(logits, [own], [step], [torch.tensor(text)]).tolist()
        text += new
    return text[len(prompt) :]

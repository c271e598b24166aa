"""Exact verification of drafted tokens: whatever the drafter, the output's law is the target's.

One chain is Leviathan, Kalman & Matias 2023 (2211.17192, algorithm 1) and Chen et al. 2023 (2302.01318, algorithm 2);
several chains at a node are the recursive rejection of SpecInfer (Miao et al. 2024, 2305.09781, algorithm 2). With p
the target's law at the node and q_h the law that chain h drew its token x from, chains are tried in their order:

- accept x with probability min(1, p(x) / q_h(x)); then go on at the child with h and the untried chains that share x;
- else let p be max(p - q_h, 0), normalised, and try the next.

When all fail, one token is drawn from what is left of p, which ends the call; when a chain is accepted to its end, one
more is drawn from p there. So a call makes 1 to n + 1 tokens. Tokens that no law was drawn from (greedy ones, the top
few) have q = 1 at x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvlab.core.errors import NonFinite
from kvlab_mechanisms.decoding.law import Order, Sampling, law
from kvlab_mechanisms.decoding.sampler import TARGET, uniform


class Draft(NamedTuple):
    """Chains of drafted tokens that all begin at one place.

    Attributes
    ----------
    tokens : sequence of sequences of int [chains, n]
    q : callable (chain, depth) -> float64 Tensor [vocabulary], or None
        The law that the token at this depth was drawn from; None for tokens that no law was drawn from.
    """

    tokens: Sequence[Sequence[int]]
    q: Callable[[int, int], Tensor] | None = None


class Target(Protocol):
    """What the target says after the first `depth` tokens of a chain, 0 to n of them."""

    def at(self, chain: int, depth: int, token: int) -> float:
        """The probability of one token."""

    def row(self, chain: int, depth: int) -> Tensor:
        """All of them, float64 [vocabulary]."""


class Verified(NamedTuple):
    """What one call makes.

    Attributes
    ----------
    tokens : list of int
        1 to n + 1: those accepted, and one of the target's own.
    chain : int
        One whose first `accepted` tokens were accepted.
    accepted : int
    """

    tokens: list[int]
    chain: int
    accepted: int


def verify(draft: Draft, target: Target, draws: Iterator[float]) -> Verified:
    """Accept of the draft what the target's law allows; see the module.

    Parameters
    ----------
    draws : iterator of float in [0, 1)
        One is taken for each token that is tried, and one for the token of the target's own.
    """
    alive, made = list(range(len(draft.tokens))), []
    for depth in range(len(draft.tokens[0])):
        alive, left = _accepted(draft, target, alive, depth, draws)
        if left is not None:
            return Verified([*made, inverse(left, next(draws))], alive[0], depth)
        made.append(draft.tokens[alive[0]][depth])
    bonus = inverse(target.row(alive[0], len(made)), next(draws))
    return Verified([*made, bonus], alive[0], len(made))


def _accepted(
    draft: Draft, target: Target, alive: list[int], depth: int, draws: Iterator[float]
) -> tuple[list[int], Tensor | None]:
    """Chains that are alive at the child that is accepted; where none is, those before, and what is left of p."""
    here, left = alive[0], None
    for place, chain in enumerate(alive):
        token = draft.tokens[chain][depth]
        q = None if draft.q is None else draft.q(chain, depth)
        p = target.at(here, depth, token) if left is None else float(left[token])
        if next(draws) * (1.0 if q is None else float(q[token])) < p:
            return [chain, *(g for g in alive[place + 1 :] if draft.tokens[g][depth] == token)], None
        left = residual(target.row(here, depth) if left is None else left, q, token)
    return alive, left


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    r""":math:`\max(p - q, 0)`, normalised, where q may be all at one token; p itself where rounding leaves nothing."""
    left = p.clone()
    if q is None:
        left[token] = 0
    else:
        left = (left - q).clamp_(min=0)
    total = left.sum()
    return left / total if total > 0 else p


def inverse(p: Tensor, u: float) -> int:
    """The first token whose cumulative mass exceeds u times the whole."""
    up_to = p.cumsum(0)
    at = min(u * float(up_to[-1]), float(torch.nextafter(up_to[-1], torch.zeros_like(up_to[-1]))))
    return int(torch.searchsorted(up_to, torch.tensor(at, dtype=p.dtype, device=p.device), right=True))


def draws_of(seed: int, step: int) -> Iterator[float]:
    """The numbers of a call that begins after `step` tokens; no other call of the request takes one of them."""
    draw = 0
    while True:
        yield uniform(seed, step, draw, TARGET)
        draw += 1


@dataclass
class TargetLogits:
    """The target as logits under a request's settings; a row is normalised when it is first visited.

    Parameters
    ----------
    logits : Tensor [chains, n + 1, vocabulary]
        After 0 to n tokens of each chain.
    own : Sampling
    text, chains : sequences of int
        What stands before the draft, and the draft, for the repetition penalty.
    order : {"hf", "vllm"}
        Of the filters.
    """

    logits: Tensor
    own: Sampling
    text: Sequence[int] = ()
    chains: Sequence[Sequence[int]] = ()
    order: Order = "hf"

    def __post_init__(self):
        own = self.own
        self._plain = own.temperature > 0 and (own.top_k, own.top_p, own.min_p, own.repetition_penalty) == (0, 1, 0, 1)
        self._norms: dict[tuple[int, int], Tensor] = {}
        self._laws: dict[tuple[int, int], Tensor] = {}

    def at(self, chain: int, depth: int, token: int) -> float:
        """See `Target`; without filters only this token's logit and the row's norm are looked at."""
        if not self._plain:
            return float(self.row(chain, depth)[token])
        place = chain, depth
        if place not in self._norms:
            self._norms[place] = torch.logsumexp(self.logits[place].double() / self.own.temperature, -1)
        return float(torch.exp(self.logits[chain, depth, token].double() / self.own.temperature - self._norms[place]))

    def row(self, chain: int, depth: int) -> Tensor:
        """See `Target`."""
        place = chain, depth
        if place not in self._laws:
            self._laws[place] = self._softmax(place) if self._plain else self._filtered(place)
        return self._laws[place]

    def _softmax(self, place: tuple[int, int]) -> Tensor:
        p = torch.softmax(self.logits[place].double() / self.own.temperature, -1)
        if p[0].isnan():  # then all are
            raise NonFinite(f"the logits at depth {place[1]} are no law: NaN, or no greatest one that is finite")
        return p

    def _filtered(self, place: tuple[int, int]) -> Tensor:
        chain, depth = place
        seen = [torch.tensor([*self.text, *(self.chains[chain][:depth] if self.chains else ())], dtype=torch.int64)]
        return law(self.logits[place][None], [self.own], seen, self.order).dense(self.logits.shape[-1])[0]

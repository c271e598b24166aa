"""The items on which mechanisms are judged, and what is scored of each.

An item is scored in a single pass over context and continuation, in which what attention reads of the context is
what was stored: for a needle that is found if every token of the answer is the most likely one behind the true ones
before it, which is when greedy decoding writes the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvlab import corpus, needles
from kvlab.experiments.plans.mechanisms import FIDELITY, NEEDLE
from kvlab.stats.divergences import token_record


@dataclass(frozen=True)
class Item:
    """Tokens of which the first `context` are stored, and the predictions from row `first` on that are scored.

    Row 0 predicts the token behind the first token that follows the context, as in `WindowRun`.
    """

    number: int
    ids: list[int]
    context: int
    first: int


def texts(windows: corpus.TokenWindows) -> Iterator[Item]:
    """The windows of the test split, of which all rows are scored."""
    for number, ids in enumerate(windows.scored("test").tolist()):
        yield Item(number, ids, windows.context, 0)


def retrievals(planted: needles.Needles) -> Iterator[Item]:
    """The needles, of which the rows that predict the answer are scored."""
    for number, needle in enumerate(planted.items):
        ids, answer = needles.sequence(needle)
        yield Item(number, ids, planted.context, answer - 1 - planted.context)


def fidelity(reference: torch.Tensor, alternative: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Mean kl, delta_nll (both in nats per token) and share of equal top tokens over the scored tokens."""
    found = token_record(reference, alternative, labels)
    return {
        "kl": found["kl"].mean().item(),
        "delta_nll": (found["nll_alt"] - found["nll_ref"]).mean().item(),
        "top1_agreement": (found["top1_alt"] == found["top1_ref"]).double().mean().item(),
    }


def answered(_reference: torch.Tensor, alternative: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Whether every token of the answer is the most likely one."""
    return {"needle_recall": float((alternative.argmax(-1).cpu() == labels).all())}


SCORERS = {FIDELITY: fidelity, NEEDLE: answered}
VERSIONS = {FIDELITY: "1", NEEDLE: needles.VERSION}  # of how they are scored; the gate's registry names them too

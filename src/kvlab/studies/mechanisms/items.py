"""The windows on which mechanisms are judged, and what is scored of each.

A window is scored over its stored context: what attention reads of the context is what was stored. A needle is found
if every token of the answer is the most likely one after the true ones before it, which is when greedy decoding
writes the answer.
"""

from __future__ import annotations

import torch

from kvlab.lab.windows import Window
from kvlab.stats.divergences import token_record
from kvlab.studies.mechanisms.plan import FIDELITY, NEEDLE
from kvlab.text import needles

TEXTS = {FIDELITY: "test", NEEDLE: "needle"}
"""The text that each eval scores."""


def retrievals(planted: needles.Needles) -> list[Window]:
    """The needles as windows, of which the rows that predict the answer are scored."""
    found = []
    for number, needle in enumerate(planted.items):
        ids, answer = needles.sequence(needle)
        found.append(Window(TEXTS[NEEDLE], number, tuple(ids), planted.context, answer - 1 - planted.context))
    return found


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

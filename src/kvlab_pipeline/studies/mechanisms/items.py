"""The windows on which mechanisms are judged, and what is scored of each.

A window is scored over its stored context: what attention reads of the context is what was stored. A needle is found
if every token of the answer is the most likely one after the true ones before it, which is when greedy decoding
writes the answer.
"""

from __future__ import annotations

import torch

from kvlab.measure.windows import Window
from kvlab.stats.divergences import ReferenceLogits
from kvlab.text import needles, ruler
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY, GREEDY, NEEDLE, TASKS

TEXTS = {FIDELITY: "test", NEEDLE: "needle", GREEDY: "test"} | {name: name for name in TASKS}
"""The text that each eval scores."""


def retrievals(planted: needles.Needles) -> list[Window]:
    """The needles as windows, of which the rows that predict the answer are scored."""
    found = []
    for number, needle in enumerate(planted.items):
        ids, answer = needles.sequence(needle)
        found.append(Window(TEXTS[NEEDLE], number, tuple(ids), planted.context, answer - 1 - planted.context))
    return found


def tasks(items: ruler.Ruler) -> dict[str, list[Window]]:
    """RULER's texts with their questions as windows, by eval; those of a task that is not asked are none."""
    found: dict[str, list[Window]] = {name: [] for name in TASKS}
    for item in items.items:
        name = next(name for name, task in TASKS.items() if task == item.task)
        ids = (*item.context, *item.question)
        found[name].append(Window(TEXTS[name], item.number, ids, len(item.context)))
    return found


def fidelity(reference: ReferenceLogits, alternative: torch.Tensor) -> dict[str, float]:
    """Mean kl, delta_nll (both in nats per token) and share of equal top tokens over the scored tokens."""
    found = reference.itself if alternative is reference.logits else reference.compare(alternative)
    return {
        "kl": found["kl"].mean().item(),
        "delta_nll": (found["nll_alt"] - found["nll_ref"]).mean().item(),
        "top1_agreement": (found["top1_alt"] == found["top1_ref"]).double().mean().item(),
    }


def answered(reference: ReferenceLogits, alternative: torch.Tensor) -> dict[str, float]:
    """Whether every token of the answer is the most likely one."""
    return {"needle_recall": float((alternative.argmax(-1) == reference.labels).all())}


SCORERS = {FIDELITY: fidelity, NEEDLE: answered}
VERSIONS = {FIDELITY: "1", NEEDLE: needles.VERSION, GREEDY: "1"} | dict.fromkeys(TASKS, ruler.VERSION)
"""Of how they are scored; the gate's registry names them too."""

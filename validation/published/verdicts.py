"""The study's own verdict rules, on point values; ours, on intervals, is `kvlab_pipeline.report.verdict`."""

from __future__ import annotations

# name of the rule -> (word, largest abs(mean change of perplexity), smallest mean top-1 agreement), best first.
# "accept" is the rule of the production and ablation harnesses, "pass" that of the later snapshot harness.
RULES = {
    "accept": (("ACCEPT", 0.01, 0.95), ("MARGINAL", 0.03, 0.85)),
    "pass": (("PASS", 0.10, 0.80), ("MARGINAL", 0.20, 0.70)),
}


def published(rule: str, change: float, top1: float) -> str:
    """The word that the study's rule gives to a mean change and a mean agreement."""
    for word, largest, smallest in RULES[rule]:
        if abs(change) <= largest and top1 >= smallest:
            return word
    return "REJECT"

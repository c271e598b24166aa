"""Whether a KL divergence is large, in words: beside rounding, and beside what quantised weights cost.

The one scale of `kvlab measure`, of its pick and of a study's pages; docs/measure.md says it to people.

The steps are the mean KL divergence to the 16-bit model, in nats per token, of LLaMA 3 8B with quantised weights on
Wikitext-2, as llama.cpp publishes it (tools/perplexity/README.md, "LLaMA 3 8b Scoreboard" and "LLaMA 2 vs. LLaMA 3
Quantization comparison", revision f364eb6f): formats that very many people run, so that a number means something
before a reader has numbers of an own. Another model and another text have other values; what is compared closely is
measured on one model and one text, with `--against`.
"""

from __future__ import annotations

from typing import NamedTuple


class ScaleStep(NamedTuple):
    """All below `kl` (nats per token) is `word`: less than what the weights of `like` cost."""

    kl: float
    word: str
    like: str


STEPS = (
    ScaleStep(0.001355, "tiny", "8-bit weights (q8_0)"),
    ScaleStep(0.005452, "very small", "6-bit weights (q6_K)"),
    ScaleStep(0.010762, "small", "5-bit weights (q5_K_M)"),
    ScaleStep(0.031273, "moderate", "4-bit weights (q4_K_M)"),
    ScaleStep(0.101913, "large", "3-bit weights (q3_K_M)"),
    ScaleStep(0.445132, "very large", "2-bit weights (q2_K)"),
)
BEYOND = f"extreme: more than {STEPS[-1].like}"
SOURCE = "LLaMA 3 8B on Wikitext-2"
ROUNDING = "none beyond rounding to bfloat16"
SMALL = STEPS[2]
"""What `kvlab measure` takes a row up to: the last step that is called small."""


def legend() -> str:
    """The words, where each ends, and whose values these are, as one clause."""
    steps = [f"{step.word} below {step.kl:.2g} ({step.like.partition(' (')[0]})" for step in STEPS]
    return f"{', '.join(steps)}, extreme above; of {SOURCE}"


def span_in_words(low: float, high: float, rounding: float | None = None) -> str:
    """How large a mean KL divergence is of which the interval is known: both ends where they differ."""
    ends = list(dict.fromkeys(in_words(kl, rounding) for kl in (low, high)))
    if len(ends) == 1:
        return ends[0]
    first, last = (end.partition(":") for end in ends)
    return f"{first[0]} to {last[0]}{last[1]}{last[2]}"


def in_words(kl: float, rounding: float | None = None) -> str:
    """How large a mean KL divergence is.

    Parameters
    ----------
    kl : float
        Nats per token.
    rounding : float, optional
        What bfloat16 costs the same model on the same text; no more than that is called nothing.
    """
    if rounding is not None and kl <= rounding:
        return ROUNDING
    for step in STEPS:
        if kl < step.kl:
            return f"{step.word}: less than {step.like}"
    return BEYOND

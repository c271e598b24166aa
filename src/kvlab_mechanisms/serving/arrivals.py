"""Traces made at random, with the statistics of published ones.

Gaps between arrivals are of a gamma distribution: shape 1 is a Poisson process, a smaller one comes in bursts (as
`--burstiness` of vLLM's own load client). Lengths are lognormal. The numbers of `AZURE_CONV` and `AZURE_CODE` were
computed from Azure's LLM inference traces of 2023 (github.com/Azure/AzurePublicDataset at b469a11, CC-BY; Patel et al.
2024, Splitwise, ISCA): means and deviations of the logarithms of all 19,366 and 8,819 requests, and 1 / cv² of their
gaps. The code trace comes in a few clumps (cv 13), which no renewal process resembles; its own gaps are in the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.trace import MOST_REQUESTS, NONE, Trace


@dataclass(frozen=True)
class Statistics:
    """Of a trace.

    Parameters
    ----------
    rate : float
        Requests per second.
    shape : float
        Of the gamma distribution of gaps: 1 / (coefficient of variation)².
    prompt, output : tuple of (float, float)
        Mean and standard deviation of the natural logarithm of tokens.
    longest : tuple of (int, int)
        Tokens of prompt and answer at which they are cut.
    share : float
        Of the requests that begin as others do.
    prefixes : int
        Beginnings that there are, drawn with Zipf's weights 1 / rank.
    prefix_tokens : int
        Of each; a prompt that shares one is longer by as many.
    """

    rate: float
    shape: float
    prompt: tuple[float, float]
    output: tuple[float, float]
    longest: tuple[int, int]
    share: float = 0.0
    prefixes: int = 0
    prefix_tokens: int = 0


AZURE_CONV = Statistics(5.530, 0.835, (6.633, 0.985), (5.019, 0.859), (14050, 1000))
AZURE_CODE = Statistics(2.566, 0.00578, (6.999, 1.360), (2.788, 0.847), (7437, 1899))
PUBLISHED = {"azure-conv": AZURE_CONV, "azure-code": AZURE_CODE}


def made(count: int, own: Statistics, seed: int = 0) -> Trace:
    """A trace of so many requests; the same for the same seed."""
    if not 1 <= count <= MOST_REQUESTS:
        raise UserError(f"{count} requests; allowed: from 1 to {MOST_REQUESTS}")
    if not (own.rate > 0 and own.shape > 0):
        raise UserError(f"rate {own.rate:g}, shape {own.shape:g}; allowed: above 0")
    chance = np.random.default_rng(seed)
    t = np.cumsum(chance.gamma(own.shape, 1 / (own.rate * own.shape), count))
    prompt, output = (
        np.clip(np.rint(chance.lognormal(*law, count)), 1, most).astype(np.int64)
        for law, most in zip((own.prompt, own.output), own.longest, strict=True)
    )
    prefix, shared = np.full(count, NONE), np.zeros(count, np.int64)
    if own.share and own.prefixes:
        weights = 1 / np.arange(1, own.prefixes + 1)
        alike = chance.random(count) < own.share
        prefix[alike] = chance.choice(own.prefixes, int(alike.sum()), p=weights / weights.sum())
        shared[alike] = own.prefix_tokens
    return Trace(t - t[0], prompt + shared, output, prefix, shared)


def scaled(own: Statistics, factor: float, **changed) -> Statistics:
    """The same statistics with lengths times a factor, for a model whose context is shorter."""
    shift = float(np.log(factor))
    lengths = {name: (getattr(own, name)[0] + shift, getattr(own, name)[1]) for name in ("prompt", "output")}
    longest = tuple(max(1, int(most * factor)) for most in own.longest)
    return replace(own, **lengths, longest=longest, **changed)

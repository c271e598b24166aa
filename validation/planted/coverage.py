"""How often an interval holds the truth: synthetic token tables with a known truth, drawn many times.

The tables are like those of the cells: windows of tokens, a random effect per window, skewed KL, cells that
share most of their scatter. Each statistic of the reports is estimated from each table by the functions that
the reports call, and the share of tables whose interval holds the truth is its coverage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import exp
from typing import Literal

import numpy as np
from scipy.stats import beta

from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.shapley import interactions, shapley
from kvlab.stats.slope import log_log_slope

BAND = (0.92, 0.98)  # what a nominal interval of 95 % must keep to
REPEATS = 1000
RESAMPLES = 2000
MANY, FEW = 32, (8, 4)  # windows: of the studies, held to the band; and fewer, for the record
TOKENS = 127  # scored tokens of a window
SHARED = 0.8  # share of the scatter that cells over the same tokens have in common
FACTORS = 3
SIZES = (0.01, 0.03, 0.1)  # of noise, for the slope
LAYERS = 6
FLIPS, FLIPS_CV = 0.03, 0.6  # mean rate of top-1 flips, and its scatter between windows
MEAN_KL = 1e-3  # nats per token
CORNERS = MEAN_KL * np.array([1.0, 1.3, 1.1, 1.4, 2.0, 2.3, 2.4, 2.8])
LAYER_MEANS = MEAN_KL * np.array([0.3, 0.2, 0.1, 0.1, 0.15, 0.35])
JOINT_MEAN = 1.25 * MEAN_KL


@dataclass(frozen=True)
class FactorLaw:
    """Positive factors of mean 1: ``gamma`` of a shape, or ``lognormal`` with a standard deviation of the logarithm."""

    name: Literal["gamma", "lognormal"]
    parameter: float

    def draw(self, source: np.random.Generator, shape: tuple[int, ...], cells: int) -> np.ndarray:
        """Factors of cells that have `SHARED` of their variance in common, float64 [cells, *shape]."""
        if self.name == "gamma":
            common = source.gamma(SHARED * self.parameter, 1 / self.parameter, shape)
            return common + source.gamma((1 - SHARED) * self.parameter, 1 / self.parameter, (cells, *shape))
        common, own = source.standard_normal(shape), source.standard_normal((cells, *shape))
        normal = SHARED**0.5 * common + (1 - SHARED) ** 0.5 * own
        return np.exp(self.parameter * normal - self.parameter**2 / 2)


@dataclass(frozen=True)
class Distribution:
    """How KL scatters: a factor per window times a factor per token, each of mean 1.

    `like` says what scatters so.
    """

    name: str
    like: str
    windows: FactorLaw
    tokens: FactorLaw

    def to_json(self) -> dict:
        """The fields as plain values."""
        return asdict(self)

    def draw(self, source: np.random.Generator, windows: int, cells: int, tokens: int = TOKENS) -> np.ndarray:
        """Factors of cells over the same tokens, float64 [cells, windows, tokens]."""
        return self.windows.draw(source, (windows, 1), cells) * self.tokens.draw(source, (windows, tokens), cells)


# Matched to tables that this pipeline measured on the embedded model: scatter, skewness and quantiles of tokens,
# scatter and skewness of window means, and what cells over the same tokens share. Windows scatter like a gamma,
# since their logarithms are skewed to the left; tokens of the block codec like a lognormal, klt's like a gamma.
DISTRIBUTIONS = (
    Distribution("block", "cells of the block codec", FactorLaw("gamma", 2.5), FactorLaw("lognormal", 1.7)),
    Distribution("klt", "cells of `klt`", FactorLaw("gamma", 80.0), FactorLaw("gamma", 0.75)),
    Distribution("single layers", "one layer coded alone", FactorLaw("gamma", 1.2), FactorLaw("lognormal", 2.1)),
)


@dataclass(frozen=True)
class Statistic:
    """A statistic of the reports: its truth, and how it is estimated from a synthetic table."""

    name: str
    truth: float
    estimate: Callable[[Bootstrap, Table], Estimate]


class Table:
    """One synthetic table: the columns of all cells, over the same windows and positions."""

    def __init__(self, distribution: Distribution, source: np.random.Generator, windows: int):
        self._grid = np.repeat(np.arange(windows), TOKENS), np.tile(np.arange(TOKENS), windows)
        kl = np.concatenate([CORNERS, [JOINT_MEAN], LAYER_MEANS])
        kl = kl[:, None, None] * distribution.draw(source, windows, len(kl))
        noisy = np.square(SIZES)[:, None, None] * distribution.draw(source, windows, len(SIZES))
        self.corners = [self.column(values) for values in kl[: len(CORNERS)]]
        self.joint, *self.layers = (self.column(values) for values in kl[len(CORNERS) :])
        self.noise = [self.column(values) for values in noisy]
        # to second order in the logits' error: a mean of KL and a variance of 2 KL (`stats.power`)
        self.delta_nll = self.column(kl[0] + np.sqrt(2 * kl[0]) * source.standard_normal(kl[0].shape))
        a = (1 - FLIPS) / FLIPS_CV**2 - FLIPS  # of a beta distribution with this mean and coefficient of variation
        rate = beta.ppf(source.random((windows, 1)), a, a * (1 / FLIPS - 1))
        self.kept = self.column((source.random((windows, TOKENS)) >= rate).astype(float))

    def column(self, values: np.ndarray) -> Column:
        """Values [windows, TOKENS] as a column."""
        return Column.of(*self._grid, values.ravel())


def statistics() -> list[Statistic]:
    """The statistics of the reports and their truths."""
    part, pair = shapley(CORNERS)[0], interactions(CORNERS)[0]
    high, low = float(CORNERS[-1]), float(CORNERS[0])
    apart = JOINT_MEAN - float(LAYER_MEANS.sum())
    return [
        Statistic("mean KL", low, lambda boot, table: boot.mean(table.corners[0])),
        Statistic("mean delta_nll", low, lambda boot, table: boot.mean(table.delta_nll)),
        Statistic("ppl_ratio", exp(low), lambda boot, table: boot.exp_mean(table.delta_nll)),
        Statistic("paired difference", high - low, lambda b, t: b.difference(t.corners[-1], t.corners[0])),
        Statistic("ratio", high / low, lambda boot, table: boot.ratio(table.corners[-1], table.corners[0])),
        Statistic("Shapley part", float(part), lambda b, t: b.combine(t.corners, lambda m: shapley(m)[..., 0])),
        Statistic("interaction", float(pair), lambda b, t: b.combine(t.corners, lambda m: interactions(m)[..., 0])),
        Statistic("top-1 rate", 1 - FLIPS, lambda boot, table: boot.rate(table.kept)),
        Statistic("log-log slope", 2.0, lambda boot, table: log_log_slope(boot, np.array(SIZES), table.noise)),
        Statistic("all layers minus their sum", apart, lambda b, t: b.combine([t.joint, *t.layers], additivity)),
    ]


def additivity(means: np.ndarray) -> np.ndarray:
    """All layers together minus the sum of the single ones; the first column is all together."""
    return means[..., 0] - means[..., 1:].sum(-1)


# ----------------------------------------------------------------------------------- the measurement


def measure(distribution: Distribution, windows: int, repeats: int = REPEATS, confidence: float = 0.95) -> list[dict]:
    """Coverage of every statistic over tables of one distribution.

    Returns
    -------
    list of dict
        ``distribution``, ``windows``, ``statistic``, ``truth``, ``repeats``; ``below`` and ``above``, the tables
        whose whole interval lies below the truth or above; ``coverage`` with the exact binomial interval
        (Clopper & Pearson 1934) that so many tables give it, ``low`` and ``high``; and ``enforced``, whether it is
        held to `BAND`.
    """
    source = np.random.default_rng([windows, DISTRIBUTIONS.index(distribution)])
    boot, wanted = Bootstrap(RESAMPLES, confidence, 0), statistics()
    missed = np.zeros((len(wanted), 2), dtype=int)
    for _ in range(repeats):
        table = Table(distribution, source, windows)
        for i, statistic in enumerate(wanted):
            found = statistic.estimate(boot, table)
            missed[i] += found.high < statistic.truth, found.low > statistic.truth
    return [
        {
            "distribution": distribution.name,
            "windows": windows,
            "statistic": statistic.name,
            "truth": statistic.truth,
            "repeats": repeats,
            "below": int(below),
            "above": int(above),
            "coverage": share(int(repeats - below - above), repeats),
            "enforced": windows == MANY,
        }
        for statistic, (below, above) in zip(wanted, missed, strict=True)
    ]


def share(hits: int, repeats: int) -> dict[str, float]:
    """hits / repeats with its exact binomial interval of 95 %."""
    low = beta.ppf(0.025, hits, repeats - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, repeats - hits) if hits < repeats else 1.0
    return {"value": hits / repeats, "low": float(low), "high": float(high)}


def holds(entry: dict) -> bool:
    """Whether a coverage lies in the band that is asked of it."""
    return not entry["enforced"] or bool(BAND[0] <= entry["coverage"]["value"] <= BAND[1])


def everything(repeats: int = REPEATS) -> list[dict]:
    """All distributions, at the studies' number of windows and at fewer."""
    return [
        entry
        for windows in (MANY, *FEW)
        for distribution in DISTRIBUTIONS
        for entry in measure(distribution, windows, repeats)
    ]

"""How often a word is wrong, and which losses an eval can see: the rule of `quality` played on made-up items.

An item is answered or not, as a needle is. Everything is drawn from a seed, so a table is the same on every machine;
the intervals and limits are those that real evidence is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlab.core.errors import UserError
from kvlab.gate.evidence.measures import ALPHA, change_bounds, measured, paired, rate_bounds
from kvlab.gate.evidence.quality import is_beyond, is_within, judge
from kvlab.gate.registry.entries import Metric

NOMINAL = ALPHA  # how often one end of an interval may be wrong
LOSSES = (0.0, 0.02, 0.05, 0.10)
SIZES = (100, 200, 500, 1000)
CHURN = 0.02  # of all items, that change without any loss
WORDS = ("within", "open", "beyond")


def false_alarm(metric: Metric, items: Sequence[float], resamples: int = 200, seed: int = 0) -> dict:
    """How often the baseline held against itself is called what; ``beyond`` is a false alarm.

    Each resample draws items with replacement and lets the baseline answer them twice, independently.

    Parameters
    ----------
    metric : Metric
        Higher is better.
    items : float [items] in [0, 1]
        The chance that the baseline answers each item. One number for all of them is the hardest case: two runs
        then share nothing but their mean.
    resamples, seed : int

    Returns
    -------
    dict
        ``key``, ``n_items``, ``resamples``, ``within``, ``open`` and ``beyond`` (counts), ``rate`` of the latter with
        its exact 95 % interval ``low`` and ``high``, and ``nominal``, what the rate is at most.

    Raises
    ------
    UserError
        When a chance is outside [0, 1], there is none, or lower is better.
    """
    chances = np.asarray(items, dtype=np.float64)
    if chances.ndim != 1 or not chances.size or not ((chances >= 0) & (chances <= 1)).all():
        raise UserError(f"items must be chances in [0, 1], one per item, not {items!r:.80}", code="user.no-chances")
    rng, n = np.random.default_rng(seed), chances.size
    drawn = chances[rng.integers(0, n, (resamples, n))]
    first, second = (rng.random(drawn.shape) < drawn for _ in range(2))
    hits, gained, lost = first.sum(1), (second & ~first).sum(1), (first & ~second).sum(1)
    given = words(metric, hits, gained, lost, n)
    beyond = int(given["beyond"].sum())
    low, high = rate_bounds(beyond, resamples)
    return {
        "key": metric.key,
        "n_items": n,
        "resamples": resamples,
        **{word: int(given[word].sum()) for word in WORDS},
        "rate": beyond / resamples,
        "low": float(low),
        "high": float(high),
        "nominal": NOMINAL,
    }


def repeated(metric: Metric, second, first, rate: bool, resamples: int = 200, seed: int = 0) -> dict[str, int]:
    """How often a baseline that really was scored twice is called what, over resamples of its items.

    Parameters
    ----------
    metric : Metric
    second, first : float [items]
        Scores of the same items in the same order.
    rate : bool
        Whether an item is answered or not.
    resamples, seed : int

    Returns
    -------
    dict of str to int
        ``within``, ``open``, ``beyond``.
    """
    second, first = np.asarray(second, dtype=np.float64), np.asarray(first, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, first.size, (resamples, first.size))
    if rate and metric.direction == "higher":
        hits, change = first[drawn].sum(1), (second - first)[drawn]
        given = words(metric, hits, (change > 0).sum(1), (change < 0).sum(1), first.size)
        return {word: int(given[word].sum()) for word in WORDS}
    if not (np.ptp(second) or np.ptp(first)):  # then all resamples are alike
        drawn = drawn[:1]
    found = [_word(metric, second[items], first[items], rate) for items in drawn]
    return {word: found.count(word) * (resamples // len(drawn)) for word in WORDS}


def _word(metric: Metric, second: np.ndarray, first: np.ndarray, rate: bool) -> str:
    change = paired(second, first, rate)
    value = change if metric.floor is None else measured(second, rate)  # the floor alone looks at it
    return judge(metric, change, value).word


def detection_curve(
    metric: Metric,
    losses: Sequence[float] = LOSSES,
    n_items: Sequence[int] = SIZES,
    resamples: int = 200,
    seed: int = 0,
    base_rate: float = 0.9,
    churn: float = CHURN,
) -> list[dict]:
    """How often each word is given for planted losses.

    Parameters
    ----------
    metric : Metric
        Higher is better.
    losses : sequence of float
        What the variant truly loses, as a share of all items.
    n_items : sequence of int
    resamples, seed : int
    base_rate : float
        Share of the items that the baseline answers.
    churn : float
        Share of the items that change without any loss, half of them for the better.

    Returns
    -------
    list of dict
        A row per loss and size: ``base_rate``, ``churn``, ``loss``, ``n_items``, and the rates ``within``, ``open`` and
        ``beyond``.

    Raises
    ------
    UserError
        When the shares cannot be, or lower is better.
    """
    return [
        {"base_rate": base_rate, "churn": churn, "loss": loss, "n_items": n}
        | {
            word: float(given.mean())
            for word, given in _play(metric, loss, n, resamples, seed, base_rate, churn).items()
        }
        for loss in losses
        for n in n_items
    ]


def items_needed(
    metric: Metric,
    loss: float,
    word: str,
    rate: float = 0.8,
    resamples: int = 200,
    seed: int = 0,
    base_rate: float = 0.9,
    churn: float = CHURN,
    most: int = 20_000,
) -> int | None:
    """The fewest items, among sizes that grow by a tenth from 20, for which `word` is given at least at `rate`.

    None when it is not up to `most`. Other parameters and errors as in `detection_curve`.
    """
    n = 20
    while n <= most:
        if _play(metric, loss, n, resamples, seed, base_rate, churn)[word].mean() >= rate:
            return n
        n += n // 10
    return None


def words(metric: Metric, hits, gained, lost, n: int) -> dict[str, np.ndarray]:
    """Which word `quality.judge` gives for counts of items, elementwise.

    Parameters
    ----------
    metric : Metric
        Higher is better.
    hits : int [resamples]
        Items that the baseline answers.
    gained, lost : int [resamples]
        Items that only the variant, or only the baseline answers.
    n : int
        All items.

    Returns
    -------
    dict of bool [resamples]
        ``within``, ``open``, ``beyond``.
    """
    if metric.direction != "higher":
        raise UserError(
            f"{metric.key} is better when lower; items that are answered or not need a metric of the other kind",
            code="user.direction",
        )
    low, high = change_bounds(gained, lost, n)
    within, beyond = is_within(-low, metric.margin), is_beyond(-high, metric.margin)
    if metric.floor is not None:
        value_low, value_high = rate_bounds(hits + gained - lost, n)
        within, beyond = within & (value_low >= metric.floor), beyond | (value_high < metric.floor)
    return {"within": within & ~beyond, "open": ~within & ~beyond, "beyond": beyond}


def _play(metric: Metric, loss: float, n: int, resamples: int, seed: int, base_rate: float, churn: float) -> dict:
    """The words on `resamples` pairs of runs over `n` items, of which a share of `loss` is lost."""
    gained, lost = churn / 2, churn / 2 + loss
    shares = np.array([base_rate - lost, lost, gained, 1 - base_rate - gained])
    if (shares < -1e-12).any() or loss < 0 or churn < 0:
        raise UserError(
            f"losing {loss} with {churn} of all items changing anyway cannot be at a rate of {base_rate}",
            code="user.impossible-loss",
        )
    drawn = np.random.default_rng([seed, n]).multinomial(n, np.clip(shares, 0, 1), size=resamples)
    kept, lost_items, gained_items, _ = drawn.T
    return words(metric, kept + lost_items, gained_items, lost_items, n)

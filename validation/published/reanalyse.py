"""What the windows of a cell allow to be said: estimates with intervals, and differences between cells.

Two intervals are given for the published estimator. Student's t over the windows is the one to read below eight
windows. The bootstrap beside it is BCa from eight windows on; below, it is the plain percentile interval, printed
because it is often asked for, and it covers less than it says.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from kvlab.stats.bootstrap import FEWEST_FOR_BCA, Bootstrap, Column, Estimate, resample_counts
from validation.published.readers.cells import published_verdict
from validation.published.rows import PassageScores, PublishedCell

BOOTSTRAP = Bootstrap(resamples=10_000, confidence=0.95, seed=0)
MOST_NATS = 700.0  # exp of more does not fit a float64
SAME_TEXT = 1e-9  # relative; two cells of one engine with the same reference perplexities scored the same passages


@dataclass(frozen=True)
class Figures:
    """Everything estimated from one cell; None where its file does not record what it takes, or has one window.

    `change_t` and `change_bootstrap` are of the mean over windows of the relative change of perplexity, the published
    estimator; `ratio` is exp(mean delta_nll), `absolute` the mean of the absolute changes (which a perfect codec
    would not bring to zero either: it is biased upwards by noise).
    """

    cell: PublishedCell
    n_windows: int
    n_tokens: int
    change: float
    change_t: Estimate | None
    change_bootstrap: Estimate | None
    delta_nll: Estimate | None
    ratio: Estimate | None
    absolute: Estimate | None
    top1: Estimate | None
    kl: Estimate | None
    abs_dlogp: Estimate | None
    coded_bytes: float | None
    published_verdict: str | None


def figures(cell: PublishedCell) -> Figures:
    """All estimates of one cell."""
    windows = cell.windows
    changes = [one.change for one in windows]
    many = len(windows) > 1
    delta = t_interval(delta_column(windows)) if many else None
    ratio = ratio_of(windows, delta) if delta else None
    sizes = known([one.coded_bytes for one in windows])
    return Figures(
        cell=cell,
        n_windows=len(windows),
        n_tokens=tokens_of(windows),
        change=statistics.fmean(changes),
        change_t=t_interval(plain_column(windows, changes)) if many else None,
        change_bootstrap=bootstrap_interval(plain_column(windows, changes)) if many else None,
        delta_nll=delta,
        ratio=ratio,
        absolute=t_interval(plain_column(windows, [abs(one) for one in changes])) if many else None,
        top1=agreement(windows) if many else None,
        kl=weighted(windows, known([one.kl for one in windows])),
        abs_dlogp=weighted(windows, known([one.abs_dlogp for one in windows])),
        coded_bytes=statistics.fmean(sizes) if sizes else None,
        published_verdict=published_verdict(cell) if cell.role in ("codec", "identity") else None,
    )


# ------------------------------------------------------------------------------------------ columns


def known(values: Sequence[float | None]) -> list[float] | None:
    """The values when all are recorded, else None."""
    return None if any(value is None for value in values) else list(values)


def tokens_of(windows: Sequence[PassageScores]) -> int:
    """Scored tokens, 0 where not recorded."""
    counts = known([one.n_tokens for one in windows])
    return sum(counts) if counts else 0


def weights(windows: Sequence[PassageScores]) -> np.ndarray:
    """Tokens by window, ones where not recorded, float64 [windows]."""
    counts = known([one.n_tokens for one in windows])
    return np.array(counts, dtype=np.float64) if counts else np.ones(len(windows))


def made(windows: Sequence[PassageScores], sums: np.ndarray, counts: np.ndarray) -> Column:
    """A column over windows; two columns are paired when their windows have the same numbers."""
    numbers = tuple(one.window for one in windows)
    return Column(sums, counts, numbers, repr(numbers), tokens_of(windows))


def plain_column(windows: Sequence[PassageScores], values: Sequence[float]) -> Column:
    """Every window counts once."""
    return made(windows, np.asarray(values, dtype=np.float64), np.ones(len(windows)))


def token_column(windows: Sequence[PassageScores], values: Sequence[float]) -> Column:
    """Means per window, every token counts once."""
    counts = weights(windows)
    return made(windows, np.asarray(values, dtype=np.float64) * counts, counts)


def delta_column(windows: Sequence[PassageScores]) -> Column:
    """delta_nll."""
    return token_column(windows, [one.delta_nll for one in windows])


# ---------------------------------------------------------------------------------------- intervals


def t_interval(column: Column) -> Estimate:
    r"""Mean :math:`\pm t_{n-1}\,s/\sqrt n` over windows.

    For windows of unequal size the standard error is the jackknife's (Efron & Tibshirani 1993, equation 11.5), which
    for equal sizes is :math:`s/\sqrt n`.
    """
    n = len(column.windows)
    total, count = column.sums.sum(), column.counts.sum()
    value = total / count
    left_out = (total - column.sums) / (count - column.counts)
    pull = left_out - left_out.mean()
    error = math.sqrt((n - 1) / n * float(pull @ pull))
    half = float(stdtrit(n - 1, 0.5 + BOOTSTRAP.confidence / 2)) * error
    return Estimate(float(value), float(value - half), float(value + half), n, column.n_tokens, "t")


def bootstrap_interval(column: Column) -> Estimate:
    """BCa from eight windows on, the percentile interval below."""
    if len(column.windows) >= FEWEST_FOR_BCA:
        return BOOTSTRAP.mean(column)
    n = len(column.windows)
    drawn = resample_counts(n, BOOTSTRAP.resamples, BOOTSTRAP.seed)
    means = (drawn @ column.sums) / (drawn @ column.counts)
    tail = (1 - BOOTSTRAP.confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    value = float(column.sums.sum() / column.counts.sum())
    return Estimate(value, float(low), float(high), n, column.n_tokens, "percentile")


def ratio_of(windows: Sequence[PassageScores], delta: Estimate) -> Estimate | None:
    """exp(mean delta_nll): BCa from eight windows on; below, exp of the t interval, made where scatter is symmetric.

    None where a bound is too large for a number.
    """
    if len(windows) >= FEWEST_FOR_BCA:
        return BOOTSTRAP.exp_mean(delta_column(windows))
    if delta.high > MOST_NATS:
        return None
    value, low, high = (math.exp(one) for one in (delta.value, delta.low, delta.high))
    return replace(delta, value=value, low=low, high=high)


def agreement(windows: Sequence[PassageScores]) -> Estimate | None:
    """Top-1 agreement over tokens."""
    values = known([one.top1 for one in windows])
    if values is None:
        return None
    column = token_column(windows, values)
    # Without the number of tokens, an exact binomial interval is over windows, which is wider.
    return BOOTSTRAP.rate(replace(column, n_tokens=column.n_tokens or len(windows)))


def weighted(windows: Sequence[PassageScores], values: list[float] | None) -> Estimate | None:
    """Mean over tokens of a quantity that may not be recorded."""
    return BOOTSTRAP.mean(token_column(windows, values)) if values and len(windows) > 1 else None


# -------------------------------------------------------------------------------------- differences


@dataclass(frozen=True)
class CellDifference:
    """What one cell costs more than another, paired by window.

    `same_text` says that both have the same reference perplexities, hence the same passages on the same engine;
    otherwise they are paired by their number alone. `crosses` names what of engine and protocol differs.
    """

    a: PublishedCell
    b: PublishedCell
    change: Estimate
    delta_nll: Estimate
    top1: Estimate | None
    same_text: bool
    crosses: tuple[str, ...]


def comparable(a: PublishedCell, b: PublishedCell) -> bool:
    """Whether two cells answer one question: same claim, windows, sizes, and no two models or depths named."""
    if a.claim != b.claim or [one.window for one in a.windows] != [one.window for one in b.windows]:
        return False
    named = ("model", "context", "eval", "n_layers")
    pairs = [(getattr(a.facts, name), getattr(b.facts, name)) for name in named]
    return len(a.windows) > 1 and all(one is None or two is None or one == two for one, two in pairs)


def same_text(a: PublishedCell, b: PublishedCell) -> bool:
    """Whether both have the same reference perplexities, window by window."""
    return all(
        math.isclose(one.ppl_ref, two.ppl_ref, rel_tol=SAME_TEXT) for one, two in zip(a.windows, b.windows, strict=True)
    )


def difference(a: PublishedCell, b: PublishedCell) -> CellDifference:
    """`b` minus `a`, paired by window."""
    change = np.array([one.change for one in b.windows]) - np.array([one.change for one in a.windows])
    nll = np.array([one.delta_nll for one in b.windows]) - np.array([one.delta_nll for one in a.windows])
    agreements = [known([one.top1 for one in cell.windows]) for cell in (a, b)]
    top1 = None
    if all(agreements):
        top1 = plain_interval(b.windows, np.array(agreements[1]) - np.array(agreements[0]))
    return CellDifference(
        a=a,
        b=b,
        change=plain_interval(b.windows, change),
        delta_nll=plain_interval(b.windows, nll),
        top1=top1,
        same_text=same_text(a, b),
        crosses=tuple(name for name in ("engine", "protocol") if getattr(a.facts, name) != getattr(b.facts, name)),
    )


def plain_interval(windows: Sequence[PassageScores], values: np.ndarray) -> Estimate:
    """BCa from eight windows on, t below; every window counts once."""
    column = plain_column(windows, values)
    return BOOTSTRAP.mean(column) if len(windows) >= FEWEST_FOR_BCA else t_interval(column)


def differences(cells: Sequence[PublishedCell]) -> list[CellDifference]:
    """Every pair of comparable cells, once for cells that hold the same numbers (`copies`).

    Channels of one file differ on purpose and are many; they carry different claims, so they are not paired here.
    """
    repeated = {id(cell) for group in copies(cells) for cell in group[1:]}
    coded = [cell for cell in cells if cell.role == "codec" and id(cell) not in repeated]
    return [difference(*ordered(a, b)) for a, b in itertools.combinations(coded, 2) if comparable(a, b)]


def copies(cells: Sequence[PublishedCell]) -> list[list[PublishedCell]]:
    """Codec cells of one engine with the same perplexities throughout: one run twice, or a setting without effect."""
    found: dict[tuple, list[PublishedCell]] = {}
    for cell in cells:
        if cell.role == "codec":
            numbers = tuple((one.window, one.ppl_ref, one.ppl_alt) for one in cell.windows)
            found.setdefault((cell.facts.engine, numbers), []).append(cell)
    return [group for group in found.values() if len(group) > 1]


def ordered(a: PublishedCell, b: PublishedCell) -> tuple[PublishedCell, PublishedCell]:
    """The pair with HF before vLLM and snapshot before in-forward, as the study subtracts them."""

    def rank(cell: PublishedCell) -> tuple[bool, bool]:
        return cell.facts.engine == "vllm", cell.facts.protocol == "in_forward"

    return (a, b) if rank(a) <= rank(b) else (b, a)

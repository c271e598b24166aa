"""How much a number of windows can tell, and how many windows a question needs."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Column, Estimate

POWER = 0.8  # of the numbers of windows that are printed
_NORMAL = NormalDist()


def predicted_standard_error(kl: float, n_eff: float) -> float:
    r"""Standard error of mean delta_nll that a mean KL implies: :math:`\sqrt{2\,KL / n_{eff}}`.

    Let the alternative's logits be the reference's plus :math:`\epsilon`. To second order
    :math:`KL(p \| q) = \tfrac12 Var_p(\epsilon)`, and for a label drawn from p,
    :math:`\Delta nll = KL - (\epsilon_y - E_p \epsilon)`, whose variance is :math:`Var_p(\epsilon) = 2 KL`.

    Parameters
    ----------
    kl : float
        Mean KL, nats per token.
    n_eff : float
        Effective number of independent tokens (`effective_tokens`).

    Returns
    -------
    float, nats per token
    """
    if kl < 0 or n_eff <= 0:
        raise Fault(f"a standard error needs kl >= 0 and n_eff > 0, not kl={kl} and n_eff={n_eff}")
    return math.sqrt(2 * kl / n_eff)


def effective_tokens(column: Column, squares: Column) -> float:
    r"""How many independent tokens would give the mean the standard error that the windows, or documents, show.

    :math:`n_{eff} = n / deff`, with the design effect the ratio of the between-window variance of the
    mean to :math:`s^2 / n` (Kish 1965, section 5.4), at least 1: clusters are not credited with more
    than their tokens.

    Parameters
    ----------
    column, squares : Column
        The quantity and its square over the same tokens.
    """
    column, squares = column.by_document(), squares.by_document()
    n_windows, n_tokens = len(column.windows), column.n_tokens
    mean = column.sums.sum() / column.counts.sum()
    variance = squares.sums.sum() / squares.counts.sum() - mean**2
    residual = column.sums - mean * column.counts
    clustered = n_windows / (n_windows - 1) * float(residual @ residual) / n_tokens**2
    if variance <= 0 or clustered <= 0:
        return float(n_tokens)
    return n_tokens / max(1.0, clustered / (variance / n_tokens))


def power_factor(confidence: float, power: float = POWER) -> float:
    r"""How many times the windows at which an effect of its size reaches significance show it with a power.

    .. math:: \left( \frac{z_{(1+c)/2} + z_p}{z_{(1+c)/2}} \right)^2

    At the windows after which an interval's end has shrunk to the null, the next study's end lies on either side of
    it alike: a power of one half. The sample size for a power p needs :math:`z_p` standard errors more (Chow, Shao &
    Wang 2008, Sample Size Calculations in Clinical Research, section 3.1.1). At 95 % and a power of 80 % it is 2.04.

    Parameters
    ----------
    confidence : float in (0, 1)
        Of the two-sided interval.
    power : float in (0, 1)
    """
    if not (0 < confidence < 1 and 0 < power < 1):
        raise Fault(
            f"a power needs confidence and power between 0 and 1, not {confidence} and {power}",
            code="fault.probability",
        )
    edge = _NORMAL.inv_cdf(0.5 + confidence / 2)
    return ((edge + _NORMAL.inv_cdf(power)) / edge) ** 2


def windows_needed(width: float, distance: float, n_windows: int, factor: float = 1.0) -> int | None:
    """Windows after which an interval's side has shrunk to `distance`, times `factor`.

    The side shrinks with the square root of the number of windows, from the `width` observed over
    `n_windows`. None when the value lies on the boundary itself: no number of windows settles that.

    Parameters
    ----------
    width : float
        From the value to the interval's end that must come in.
    distance : float
        From the value to the boundary that this end must not cross.
    n_windows : int
        Windows that `width` comes from.
    factor : float
        `power_factor` for the power with which another study of so many windows succeeds, if the truth is what this
        one found; 1 is a power of one half.
    """
    if not distance > 0:
        return None
    exact = n_windows * (width / distance) ** 2 * factor
    if not np.isfinite(exact):
        return None
    return max(n_windows + 1, math.floor(exact) + 1)


def windows_for_sign(estimate: Estimate, power: float = POWER) -> int | None:
    """Windows that would show the sign of `estimate` with a power; its own number when it is settled already.

    Post hoc: the effect is taken to be what was found. None when none is to be seen.
    """
    if estimate.low > 0 or estimate.high < 0:
        return estimate.n_windows
    width = estimate.value - estimate.low if estimate.value > 0 else estimate.high - estimate.value
    return windows_needed(width, abs(estimate.value), estimate.n_windows, power_factor(estimate.confidence, power))

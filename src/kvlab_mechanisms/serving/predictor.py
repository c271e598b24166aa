"""What a step of an engine, or a whole request, takes: fitted on measured runs, with an interval, or said unknown.

Coefficients are seconds per something that is counted, so none of them is negative: non-negative least squares
(Lawson & Hanson 1974, chapter 23) on columns of equal length. The bytes that a token's K and V take are an input, so a
fit answers what another width would take, as far as reading them is what takes the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from kvlab.core.errors import UserError

STEP = ("step", "prefill token", "attended pair", "decoding sequence", "byte of KV read")
REQUEST = ("request", "prompt token", "prompt token squared", "output token", "byte of KV read", "sequence beside")
RANK = 1e-9  # of a column's length, below which what is left of it is rounding
ALONG = 1e-6  # share of a question that may lie where nothing was measured


class Unfitted(UserError):
    """Nothing can be predicted; the message says what is missing."""

    code = "unfitted"


def step_features(prefill: ArrayLike, pairs: ArrayLike, decodes: ArrayLike, read_bytes: ArrayLike) -> NDArray:
    """Rows [n, 5] of `STEP`.

    Parameters
    ----------
    prefill, pairs : array_like
        Prompt tokens of a step, and the pairs of query and key that they attend to.
    decodes, read_bytes : array_like
        Sequences of which a step makes one token, and bytes of K and V that are read for them.
    """
    columns = np.broadcast_arrays(1.0, *(np.asarray(one, float) for one in (prefill, pairs, decodes, read_bytes)))
    return np.stack([np.atleast_1d(one) for one in columns], axis=-1)


def request_features(prompt: ArrayLike, output: ArrayLike, batch: ArrayLike, token_bytes: ArrayLike) -> NDArray:
    """Rows [n, 6] of `REQUEST`: prefill has a quadratic term, decoding reads a cache that grows.

    Parameters
    ----------
    prompt, output, batch : array_like
        Tokens of the prompt and of the answer; sequences that are served beside.
    token_bytes : array_like
        Bytes of K and V of a token, all layers together.
    """
    p, d, b, k = (np.asarray(one, float) for one in (prompt, output, batch, token_bytes))
    columns = np.broadcast_arrays(1.0, p, p * p, d, d * (p + d / 2) * k, b)
    return np.stack([np.atleast_1d(one) for one in columns], axis=-1)


class PredictedSeconds(NamedTuple):
    """Seconds, an interval, and whether what was measured determines them at all."""

    value: float
    low: float
    high: float
    determined: bool


@dataclass(frozen=True)
class FittedTimes:
    """A model of seconds.

    Parameters
    ----------
    names : tuple of str
        Of the columns.
    coefficients : ndarray [f]
        Seconds per unit of each, at least 0.
    half_width : float
        Of the interval, seconds: infinite where too few rows were held out.
    coverage : float
        Of the interval.
    blind : ndarray [f, r]
        Directions of the scaled columns in which nothing was measured; r is 0 for data of full rank.
    lengths : ndarray [f]
        Of the columns, by which they were scaled.
    rows : int
        That the coefficients were fitted on.
    """

    names: tuple[str, ...]
    coefficients: NDArray
    half_width: float
    coverage: float
    blind: NDArray
    lengths: NDArray
    rows: int

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Columns whose coefficient the data does not tell from others'."""
        seen = np.abs(self.blind).max(axis=1, initial=0) <= ALONG
        return tuple(name for name, told in zip(self.names, seen, strict=True) if not told)

    def seconds(self, features: ArrayLike) -> NDArray:
        """Seconds [n] of rows [n, f], at least 0."""
        return np.asarray(features, float) @ self.coefficients

    def predict(self, features: ArrayLike) -> PredictedSeconds:
        """One row [f] or [1, f]; quickest for a tuple."""
        row = features if type(features) is tuple else np.asarray(features, float).ravel().tolist()
        if len(row) != len(self.names):
            raise Unfitted(
                f"a row of {len(row)} numbers; allowed: {len(self.names)}, one for each of {self.names}",
                code="unfitted.row-length",
            )
        value, half = sum(map(mul, row, self._numbers)), self.half_width
        low, determined = value - half, self._sees_all or self._determined(np.array(row))
        return PredictedSeconds(value, low if low > 0 else 0.0, value + half, determined)

    @cached_property
    def _numbers(self) -> list[float]:
        """The coefficients; a dozen numbers are multiplied quicker without an array around them."""
        return self.coefficients.tolist()

    @cached_property
    def _sees_all(self) -> bool:
        """Whether something was measured in every direction."""
        return not self.blind.size

    def _determined(self, row: NDArray) -> bool:
        """Whether a row lies, but for rounding, where something was measured."""
        scaled = row * self.lengths
        along = np.linalg.norm(scaled @ self.blind)
        return bool(along <= ALONG * max(np.linalg.norm(scaled), 1e-300))


def fit(
    features: ArrayLike, seconds: ArrayLike, names: Sequence[str] = STEP, *, coverage: float = 0.9, seed: int = 0
) -> FittedTimes:
    """Fit on two thirds of the rows, and take the interval from the others' residuals.

    The half width is the ceil((n + 1) coverage)-th smallest residual of n rows that were held out: split conformal
    prediction, which covers a new row of the same law at least so often, whatever the law (Lei et al. 2018, Journal of
    the American Statistical Association 113:1094, theorem 2).

    Raises
    ------
    Unfitted
        Fewer than twice as many rows as columns, or numbers that are not finite or negative.
    """
    x, y = np.asarray(features, float), np.asarray(seconds, float)
    if x.ndim != 2 or x.shape[1] != len(names) or len(x) != len(y):
        raise Unfitted(
            f"rows of {x.shape} and {y.shape} numbers; allowed: [n, {len(names)}] and [n]", code="unfitted.shapes"
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x >= 0).all() and (y >= 0).all()):
        raise Unfitted(
            "a measured row holds a number that is negative or not finite; measure it again",
            code="unfitted.impossible-number",
        )
    if len(x) < 2 * len(names):
        raise Unfitted(
            f"{len(x)} measured rows; allowed: at least {2 * len(names)}, for {len(names)} coefficients",
            code="unfitted.too-few-rows",
        )
    order = np.random.default_rng(seed).permutation(len(x))
    held = order[: len(x) // 3]
    kept = np.setdiff1d(order, held)
    coefficients, blind, lengths = non_negative(x[kept], y[kept])
    residuals = np.sort(np.abs(y[held] - x[held] @ coefficients))
    rank = math.ceil((len(held) + 1) * coverage)
    half = float(residuals[rank - 1]) if rank <= len(held) else math.inf
    return FittedTimes(tuple(names), coefficients, half, coverage, blind, lengths, len(kept))


def non_negative(x: NDArray, y: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Coefficients [f] that are at least 0, the blind directions [f, r], and the columns' scale [f] (1 / length)."""
    lengths = np.linalg.norm(x, axis=0)
    scale = 1 / np.where(lengths > 0, lengths, 1.0)
    scaled = x * scale
    _, values, directions = np.linalg.svd(scaled, full_matrices=False)
    rank = int((values > RANK * max(values.max(initial=0), 1e-300)).sum())
    found, _ = nnls(scaled, y)
    return found * scale, directions[rank:].T, scale


class Online:
    """A fit that follows a service as it runs: coefficients of the newest rows, solved when they are asked for.

    What is kept is the information form of recursive least squares with forgetting (Haykin 2002, Adaptive Filter
    Theory, chapter 9): the forgotten sums of x xᵀ and x y, which are O(f²) to update and exact, where the covariance
    form starts from a guess.

    Parameters
    ----------
    names : sequence of str
        Of the columns.
    forgetting : float
        By which a row counts less with every row after it; 1 forgets nothing.
    """

    def __init__(self, names: tuple[str, ...], forgetting: float = 0.999):
        if not 0 < forgetting <= 1:
            raise UserError(f"forgetting {forgetting:g}; allowed: above 0, at most 1")
        self.names, self.forgetting, self.rows = names, forgetting, 0
        self._products = np.zeros((len(names), len(names)))
        self._answers = np.zeros(len(names))
        self._known: NDArray | None = None

    def record(self, features: ArrayLike, seconds: float) -> None:
        """Take one row [f] and what it took; O(f²) time, no memory."""
        row = np.asarray(features, float).reshape(-1)
        self._products *= self.forgetting
        self._products += np.outer(row, row)
        self._answers *= self.forgetting
        self._answers += row * seconds
        self.rows += 1
        self._known = None

    def coefficients(self, negative: bool = False) -> NDArray:
        """Seconds per unit [f], at least 0 unless `negative`; `Unfitted` before the rows determine them."""
        if self._known is None or negative:
            scale = 1 / np.sqrt(np.maximum(np.diag(self._products), 1e-300))
            scaled = self._products * np.outer(scale, scale)
            values, vectors = np.linalg.eigh(scaled)
            if self.rows < len(self.names) or values[0] < 1e-12 * max(values[-1], 1e-300):
                raise Unfitted(
                    f"{self.rows} rows do not determine {len(self.names)} coefficients; record others",
                    code="unfitted.undetermined",
                )
            root = np.sqrt(values)[:, None] * vectors.T  # root.T @ root is `scaled`
            target = (vectors.T @ (self._answers * scale)) / np.sqrt(values)
            if negative:
                return np.linalg.solve(root, target) * scale
            self._known = nnls(root, target)[0] * scale
        return self._known

    def predict(self, features: ArrayLike) -> float:
        """Seconds of one row [f], at least 0."""
        return float(np.asarray(features, float).reshape(-1) @ self.coefficients())

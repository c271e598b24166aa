"""A fit that follows a service as it runs: recursive least squares with forgetting, solved when it is asked.

What is kept is the information form of recursive least squares (Haykin 2002, Adaptive Filter Theory, chapter 9): the
forgotten sums of x xᵀ and x y, which are O(f²) to update and exact, where the covariance form starts from a guess.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.predictor import Unfitted


class Online:
    """Coefficients of the newest rows.

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
                raise Unfitted(f"{self.rows} rows do not determine {len(self.names)} coefficients; record others")
            root = np.sqrt(values)[:, None] * vectors.T  # root.T @ root is `scaled`
            target = (vectors.T @ (self._answers * scale)) / np.sqrt(values)
            if negative:
                return np.linalg.solve(root, target) * scale
            self._known = nnls(root, target)[0] * scale
        return self._known

    def predict(self, features: ArrayLike) -> float:
        """Seconds of one row [f], at least 0."""
        return float(np.asarray(features, float).reshape(-1) @ self.coefficients())

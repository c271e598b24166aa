"""KL of small noise as c sigma^2: the coefficient, and what it predicts for noise of another size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.slope import inverse_variances


@dataclass(frozen=True, eq=False)
class QuadraticLaw:
    r"""The law :math:`KL = c\,\sigma^2` over the points of a curve where the model responds linearly.

    :math:`\log c` is the weighted mean of :math:`\log \bar y_i - 2 \log \sigma_i`, with weights
    :math:`(\bar y_i / se_i)^2`, the inverse variance of :math:`\log \bar y_i` (delta method), `se` between
    windows, as in `stats.slope`. The weights are fixed by the data; `coefficient_of` repeats the rest in a resample.

    Parameters
    ----------
    sizes : float64 [points], positive
        The sigmas.
    columns : tuple of Column, paired
        KL at each size, positive in every window.
    weights : float64 [points]
        They sum to 1.
    """

    sizes: np.ndarray
    columns: tuple[Column, ...]
    weights: np.ndarray

    @classmethod
    def of(cls, sizes: np.ndarray, columns: list[Column]) -> QuadraticLaw:
        """The law of some points.

        Raises
        ------
        Fault
            When there is no point, or a size is not positive.
        """
        sizes = np.asarray(sizes, dtype=np.float64)
        if not columns or len(columns) != sizes.size or not (sizes > 0).all():
            raise Fault(f"a law needs a column for each of some positive sizes, not {len(columns)} for {sizes}")
        return cls(sizes, tuple(columns), inverse_variances(columns))

    def coefficient_of(self, means: np.ndarray) -> np.ndarray:
        """c for means [..., points] of the columns; float64 [...]."""
        return np.exp((np.log(means) - 2 * np.log(self.sizes)) @ self.weights)

    def coefficient(self, bootstrap: Bootstrap) -> Estimate:
        """c with its interval over windows, nats per token at noise as large as the signal."""
        return bootstrap.combine(self.columns, self.coefficient_of)

"""Whitening of K by the Cholesky factor of the queries' second moment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.shared.metric import ridged
from kvlab.codecs.shared.products import product
from kvlab.core.errors import CalibrationMismatch, Fault, NonFinite

EXTRA_RIDGE = 1e-2


class NotPositiveDefinite(Fault):
    """A second moment has no Cholesky factor, even with the extra ridge."""

    code = "not-positive-definite"


@dataclass(frozen=True)
class Whitener:
    """K_w = K L per KV head, and back by L^-1.

    With Sigma = L L^T the plain squared error of K_w is the Sigma-weighted error of K:
    ||(K - K') L||_F^2 = sum_i e_i^T Sigma e_i, the expected squared error of the scores q.k.

    Parameters
    ----------
    chol, inv_chol : Tensor
        L (lower triangular) and its inverse, float32 [heads, head_dim, head_dim].
    """

    chol: Tensor
    inv_chol: Tensor

    def whiten(self, rows: Tensor) -> Tensor:
        """[heads, tokens, head_dim] into the whitened domain; `CalibrationMismatch` on another shape."""
        self.fits(rows.shape)
        return product(rows, self.chol.to(rows.device))

    def unwhiten(self, rows: Tensor) -> Tensor:
        """[heads, tokens, head_dim] back from the whitened domain."""
        return product(rows, self.inv_chol.to(rows.device))

    def unwhiten_head(self, rows: Tensor, head: int) -> Tensor:
        """[n, head_dim] of one head back from the whitened domain."""
        return rows @ self.inv_chol[head].to(rows.device)

    def fits(self, shape: tuple[int, ...]) -> None:
        """`CalibrationMismatch` when [heads, tokens, head_dim] is not what the whitener is for."""
        if (shape[0], shape[2]) != tuple(self.chol.shape[:2]):
            raise CalibrationMismatch(
                f"the whitener is for {self.chol.shape[0]} KV heads of {self.chol.shape[1]} dimensions, the model "
                f"has {shape[0]} of {shape[2]}; calibrate this model",
                code="calibration.other-shape",
            )


def fit(sigma: Tensor, ridge: float) -> Whitener:
    """The whitener of a second moment, computed in float64.

    Parameters
    ----------
    sigma : Tensor
        Second moments [heads, head_dim, head_dim]; the symmetric part is used.
    ridge : float
        Added to the diagonal, times the diagonal; see `codecs.shared.metric.ridged`.

    Returns
    -------
    Whitener
        Of Sigma + ridge * diag(Sigma). A head that has no Cholesky factor so gets a further
        1e-2 * mean(diag Sigma) * I.

    Raises
    ------
    NonFinite
        When `sigma` holds NaN or infinity.
    NotPositiveDefinite
        When a head has no Cholesky factor even with a further ridge of 1e-2.
    """
    sigma = sigma.double()
    if not torch.isfinite(sigma).all():
        raise NonFinite("the second moment of the queries holds NaN or infinity")
    sigma = (sigma + sigma.mT) / 2
    identity = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
    metric = ridged(sigma, ridge)
    chol, failed = torch.linalg.cholesky_ex(metric)
    if failed.any():
        extra = EXTRA_RIDGE * sigma.diagonal(dim1=-2, dim2=-1).mean(-1) * (failed > 0)
        chol, failed = torch.linalg.cholesky_ex(metric + extra[:, None, None] * identity)
    if failed.any():
        heads = failed.nonzero().flatten().tolist()
        raise NotPositiveDefinite(
            f"the second moment of KV head {heads[0]} is not positive definite with ridge "
            f"{ridge:g} + {EXTRA_RIDGE:g}; use a larger calibration.ridge or more calibration windows"
        )
    inverse = torch.linalg.solve_triangular(chol, identity.expand_as(chol), upper=False)
    return Whitener(chol.float(), inverse.float())

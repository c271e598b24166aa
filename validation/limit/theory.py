"""The Gaussian rate-distortion limit in the metric of the scores, and where a codec's excess bits go.

A Gaussian vector whose covariance has eigenvalues lambda_i cannot be coded with less than

    R(D) = 1/n sum_i max(0, 1/2 log2(lambda_i / theta)),   D = 1/n sum_i min(theta, lambda_i)

bits per value at the mean squared error D per value: reverse water-filling (Kolmogorov 1956; Cover and
Thomas, Elements of Information Theory, 10.3.3). Where an error e costs e^T W e, the lambda_i are the eigenvalues
of W^1/2 C W^1/2. W is the caller's: the pipeline's are those of `codecs.shared.metric`, Sigma_q averaged over lags for
K and W_o^T W_o for V. The limit is that of one token at a time: what a codec gains from the likeness of
neighbouring tokens, or from tails that are not Gaussian, may take it below.

Everything is float64 and works on any leading axes: [layers, heads, n] as well as [n].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.shared.quantizer import gaussian_table, mse
from kvlab.core.errors import NonFinite, UserError

PARTS = ("metadata", "mismatch", "allocation", "granular", "shape")


# ------------------------------------------------------------------------------------- the spectrum


def covariance(rows: Tensor) -> Tensor:
    """Covariance about the mean, over the last axis but one; float64 [..., n, n], divided by the row count."""
    rows = rows.double()
    rows = rows - rows.mean(-2, keepdim=True)
    return rows.mT @ rows / rows.shape[-2]


def root(matrix: Tensor) -> Tensor:
    """Symmetric square root of positive semidefinite matrices [..., n, n]; eigenvalues below zero count as zero."""
    values, vectors = torch.linalg.eigh(symmetric(matrix))
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT


def spectrum(covariance: Tensor, weight: Tensor | None = None) -> Tensor:
    """Eigenvalues of ``W^1/2 C W^1/2``, descending.

    Parameters
    ----------
    covariance : Tensor
        C, of K or V [..., n, n].
    weight : Tensor or None
        W, of the same heads [..., n, n]; None weighs every direction alike.

    Returns
    -------
    Tensor
        float64 [..., n], none below zero.

    Raises
    ------
    NonFinite
        When a matrix holds NaN or infinity.
    """
    for matrix in (covariance, weight):
        if matrix is not None and not torch.isfinite(matrix).all():
            raise NonFinite("a covariance of the rate-distortion limit holds NaN or infinity")
    if weight is not None:
        half = root(weight)
        covariance = half @ symmetric(covariance) @ half
    return torch.linalg.eigvalsh(symmetric(covariance)).clamp(min=0).flip(-1)


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part in float64."""
    matrix = matrix.double()
    return (matrix + matrix.mT) / 2


def coding_gain(eigenvalues: Tensor) -> Tensor:
    """What equal bits in every direction forfeit, ``1/2 log2(arithmetic over geometric mean)`` bits per value.

    The transform coding gain (Jayant and Noll 1984, 12.2) as a rate; infinite when an eigenvalue is zero.
    """
    eigenvalues = eigenvalues.double()
    return (eigenvalues.mean(-1).log2() - eigenvalues.log2().mean(-1)) / 2


def log_det_bias(dimension: int, rows: int) -> float:
    """How far the limit of an empirical covariance lies below the true one, bits per value; negative.

    For independent Gaussian rows the sample covariance is Wishart with ``rows - 1`` degrees of freedom, so

        E ln det S - ln det C = sum_{i=1..n} psi((rows - i) / 2) + n ln(2 / rows)

    (Anderson, An Introduction to Multivariate Statistical Analysis, 7.5), about ``-(n + 1) / (4 rows ln 2)``
    bits per value once halved and divided by n. It is the bias of R(D) while the water is below all
    eigenvalues. Correlated rows count for fewer, so for them it is too small. A caller that subtracts it says so.

    Raises
    ------
    UserError
        When there are not more rows than dimensions; the empirical covariance is singular then.
    """
    if rows <= dimension:
        raise UserError(f"{rows} rows of {dimension} dimensions have a singular covariance; give more rows")
    halves = (rows - torch.arange(1, dimension + 1, dtype=torch.float64)) / 2
    total = torch.special.digamma(halves).sum().item() + dimension * math.log(2 / rows)
    return total / (2 * dimension * math.log(2))


# ---------------------------------------------------------------------------------------- the limit


def water_level(eigenvalues: Tensor, bits: float | Tensor) -> Tensor:
    """The level theta at which the rate is `bits` per value [...].

    With the k largest eigenvalues active the level is ``log2 theta_k = (sum log2 lambda_i - 2 n bits) / k``.
    R(theta) is the largest over k of what k components cost, hence theta is the largest theta_k.
    """
    ordered = eigenvalues.double().sort(-1, descending=True).values
    size = ordered.shape[-1]
    bits = torch.as_tensor(bits, dtype=torch.float64, device=ordered.device)
    active = torch.arange(1, size + 1, dtype=torch.float64, device=ordered.device)
    return torch.exp2(((ordered.log2().cumsum(-1) - 2 * size * bits[..., None]) / active).amax(-1))


def distortion_at(eigenvalues: Tensor, bits: float | Tensor) -> Tensor:
    """The least mean squared error per value that `bits` per value can reach [...]."""
    level = water_level(eigenvalues, bits)
    return torch.minimum(eigenvalues.double(), level[..., None]).mean(-1)


def rate_at(eigenvalues: Tensor, distortion: float | Tensor) -> Tensor:
    """The least bits per value at a mean squared error per value [...]; infinite at zero error.

    With the m smallest eigenvalues under water the level is ``(n D - their sum) / (n - m)``. Water holds
    the smaller of level and eigenvalue, so the true level is the largest of these.
    """
    ordered = eigenvalues.double().sort(-1).values
    size = ordered.shape[-1]
    distortion = torch.as_tensor(distortion, dtype=torch.float64, device=ordered.device)
    drowned = ordered.cumsum(-1) - ordered  # the sum of the m smallest, m = 0..n-1
    above = torch.arange(size, 0, -1, dtype=torch.float64, device=ordered.device)
    level = ((size * distortion[..., None] - drowned) / above).amax(-1, keepdim=True)
    dry = ordered > level
    return torch.where(dry, (ordered / torch.where(dry, level, ordered)).log2() / 2, 0).mean(-1)


def decibels_above(eigenvalues: Tensor, distortion: Tensor, bits: float | Tensor) -> Tensor:
    """``10 log10`` of an error over the least error at the same bits [...]; minus infinity at zero error."""
    return 10 * (distortion.double() / distortion_at(eigenvalues, bits)).log10()


# --------------------------------------------------------------------------------- where bits are lost


@dataclass(frozen=True)
class ExcessBits:
    """A codec's bits above the limit, and the five parts whose sum they are; bits per value.

    The parts are the steps of one chain from the bytes down to the limit, each the difference of two
    numbers that were measured, so the sum is exact:

    ============  ==========================================================================
    R_real        bits of the serialised stream
    R_index       bits of the quantiser's indices alone
    R_ideal       R_index less what the quantiser loses on the source that it was made for
    R(D_twin)     limit at the error on the Gaussian twin, calibrated on the twin
    R(D_oracle)   limit at the error when calibrated on the scored tensor itself
    R(D)          limit at the error
    ============  ==========================================================================

    Attributes
    ----------
    metadata : float
        R_real - R_index: scales, zeros, norms, bases, headers, checksums, escapes, padding.
    granular : float
        R_index - R_ideal: the quantiser's cells (and its clipping) against an ideal Gaussian code.
    allocation : float
        R_ideal - R(D_twin): bits in the wrong directions. The twin is Gaussian and has the scored tensor's
        mean and covariance, so nothing else is left to lose on it: for equal bits after a rotation it is
        the coding gain, for bits by water-filling the rounding to integers. Side information that
        allocates (a scale per group) is booked as metadata and can make it slightly negative.
    shape : float
        R(D_twin) - R(D_oracle): what the true shape of the source costs beyond a Gaussian of its
        covariance; negative when the codec profits from it.
    mismatch : float
        R(D_oracle) - R(D): calibration on other text than is scored.
    """

    excess: float
    metadata: float
    mismatch: float
    allocation: float
    granular: float
    shape: float


def split(real: float, index: float, ideal: float, at_twin: float, at_oracle: float, at_scored: float) -> ExcessBits:
    """The parts from the six numbers of the chain, bits per value; see `ExcessBits`."""
    return ExcessBits(
        excess=real - at_scored,
        metadata=real - index,
        granular=index - ideal,
        allocation=ideal - at_twin,
        shape=at_twin - at_oracle,
        mismatch=at_oracle - at_scored,
    )


def lloyd_max_loss(bits: Tensor | list[int]) -> Tensor:
    """Bits that Gaussian Lloyd-Max tables of integer `bits` lose on N(0, 1), elementwise, float64.

    .270, .455, .572, .641 at 1..4 bits, 1/2 log2(sqrt(3) pi / 2) in the end; nothing at 0 bits, where the
    value stays at its mean. For a codec that gives component i its own b_i, the mean over i.
    """
    bits = torch.as_tensor(bits)
    losses = torch.zeros(bits.shape, dtype=torch.float64, device=bits.device)
    for b in bits.unique().tolist():
        if b > 0:
            losses[bits == b] = b + math.log2(mse(gaussian_table(int(b)))) / 2
    return losses


def gaussian_twin(rows: Tensor, source: torch.Generator) -> Tensor:
    """Independent Gaussian rows with exactly the mean and the empirical covariance of `rows`.

    Parameters
    ----------
    rows : Tensor
        [heads, rows, n], with more rows than n.
    source : torch.Generator
        Of any device; the numbers are drawn there.

    Returns
    -------
    Tensor
        float64, the same shape, on the device of `rows`.

    Raises
    ------
    UserError
        When there are not more rows than dimensions.
    """
    heads, count, size = rows.shape
    if count <= size:
        raise UserError(f"{count} rows cannot have a given covariance of {size} dimensions; give more rows")
    white = torch.randn(heads, count, size, generator=source, dtype=torch.float64, device=source.device)
    white = white.to(rows.device)
    white = white - white.mean(1, keepdim=True)
    chol = torch.linalg.cholesky(covariance(white))
    white = torch.linalg.solve_triangular(chol.mT, white, upper=True, left=False)
    return white @ root(covariance(rows)) + rows.double().mean(1, keepdim=True)

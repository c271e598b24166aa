"""KV heads coded together: as many neighbours as make up a vector of at most `WIDEST` dimensions.

The heads of a layer see the same hidden state, so that what one holds says something of the others. Components that
are joint over them need fewer bits for the same error; their number, and with it the calibration, grows with the
square of a vector's width, hence the limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.shared.whitening import NotPositiveDefinite
from kvlab.core.errors import CalibrationMismatch

WIDEST = 256


def heads_together(heads: int, head_dim: int) -> int:
    """KV heads of a group: the most that divide `heads` and make up at most `WIDEST` dimensions; 1 of wider ones."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * head_dim <= WIDEST))


def joined(x: Tensor, groups: int) -> Tensor:
    """Vectors of heads [heads, n, head_dim] as those of groups [groups, n, heads / groups * head_dim]."""
    return x.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)


def centred(x: Tensor, mean: Tensor) -> Tensor:
    """`joined` of x [heads, n, head_dim] less the groups' means [groups, 1, width], in one pass over both."""
    apart = x.unflatten(0, (len(mean), -1)).transpose(1, 2)
    out = torch.empty(apart.shape, dtype=x.dtype, device=x.device)
    return torch.sub(apart, mean.unflatten(2, apart.shape[2:]), out=out).flatten(2)


def parted(x: Tensor, heads: int) -> Tensor:
    """Vectors of groups [groups, n, width] as those of heads [heads, n, head_dim]."""
    return x.unflatten(2, (heads // x.shape[0], -1)).transpose(1, 2).flatten(0, 1)


def block_diagonal(blocks: Tensor, groups: int) -> Tensor:
    """Matrices of heads [heads, d, d] as those of groups, zero between heads [groups, width, width]."""
    return torch.stack([torch.block_diag(*own) for own in blocks.unflatten(0, (groups, -1))])


def diagonal_blocks(matrix: Tensor, heads: int) -> Tensor:
    """The heads' own blocks [heads, d, d] of matrices of groups [groups, width, width]."""
    per = heads // matrix.shape[0]
    blocks = matrix.unflatten(1, (per, -1)).unflatten(3, (per, -1))
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)


def factor(metric: Tensor | None, like: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of the metric of groups, and its inverse, as `like` [groups, width] is kept."""
    identity = torch.eye(like.shape[1], dtype=like.dtype, device=like.device).expand(len(like), -1, -1)
    if metric is None:
        return identity, identity
    if tuple(metric.shape) != (heads, head_dim, head_dim):
        raise CalibrationMismatch(
            f"the metric has shape {list(metric.shape)}, rows of {heads} heads of {head_dim} dimensions need"
            f" {[heads, head_dim, head_dim]}; fit metric and components on the same model",
            code="calibration.other-shape",
        )
    metric = block_diagonal(metric.to(like), len(like))
    chol, failed = torch.linalg.cholesky_ex((metric + metric.mT) / 2)
    if failed.any() or not torch.isfinite(chol).all():
        raise NotPositiveDefinite("the metric is not positive definite; use a larger calibration.ridge")
    return chol, torch.linalg.solve_triangular(chol, identity, upper=False)

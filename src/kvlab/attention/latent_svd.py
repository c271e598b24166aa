r"""A latent cache for a model that has none: K and V of a layer, before the rotary embedding, from L numbers.

All heads' keys and values of a token, stacked as y, are linear in what the layer is given, y = W x. A plain truncated
SVD of W keeps what is large in W; what matters is what is large in y on real text. So W is whitened by the second
moment of x before it is cut (Yuan et al. 2023, ASVD, arXiv 2312.05821; Wang et al. 2024, SVD-LLM, arXiv 2403.07378):

.. math:: W S = A \Sigma B^T, \qquad S S^T = E[x x^T], \qquad \hat y = A_L A_L^T y .

As :math:`W S S^T W^T = E[y y^T]`, A is the eigenvectors of y's own second moment, which is all that has to be measured.
With a mean and a metric M, in which errors of y are weighed, :math:`\hat y = \mu + M^{-1} A_L A_L^T M (y - \mu)`,
where A is of M y.

V may be absorbed (`latent`). K may not: it is turned by its position after it was made, and a rotation that differs
from token to token does not pass through the product. K is made anew from the latents and then turned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.core.errors import LayoutMismatch, UserError


@dataclass(frozen=True)
class LatentMap:
    """To latents and back, of one layer.

    Parameters
    ----------
    mean : Tensor, shape (n,)
        Of y; n = 2 * kv_heads * head_dim.
    down, up : Tensor, shape (n, latent)
        ``(y - mean) @ down`` is the latent c, ``c @ up.T + mean`` is y again.
    kv_heads : int
    """

    mean: Tensor
    down: Tensor
    up: Tensor
    kv_heads: int

    @property
    def rank(self) -> int:
        """Numbers of a latent."""
        return self.down.shape[1]

    def latents(self, k: Tensor, v: Tensor) -> Tensor:
        """Of K and V (kv_heads, tokens, head_dim), [tokens, latent] in the map's dtype."""
        return (stacked(k, v).to(self.mean.dtype) - self.mean) @ self.down

    def restored(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """K, before its rotary embedding, and V of latents, (kv_heads, tokens, head_dim) each."""
        y = latents.to(self.mean.dtype) @ self.up.T + self.mean
        k, v = y.unflatten(1, (2, self.kv_heads, -1)).permute(1, 2, 0, 3)
        return k, v


def stacked(k: Tensor, v: Tensor) -> Tensor:
    """K and V of all heads (kv_heads, tokens, head_dim), token by token: [tokens, 2 * kv_heads * head_dim]."""
    if k.shape != v.shape:
        raise LayoutMismatch(f"K is {tuple(k.shape)} and V {tuple(v.shape)}; a latent is of both")
    return torch.stack([k, v]).permute(2, 0, 1, 3).flatten(1)


@dataclass
class LatentMoments:
    """Sums over calibration tokens of one layer, in float64: what `fit` and `attention_metric` read.

    Parameters
    ----------
    kv_heads : int
    """

    kv_heads: int
    tokens: int = 0
    first: Tensor | float = 0.0  # of y
    second: Tensor | float = 0.0  # of y y^T
    asked: Tensor | float = 0.0  # of q q^T by KV head, over the heads of its group
    queries: int = 0

    def add(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take up tokens: q (heads, tokens, head_dim) before its rotary embedding, as k; k, v (kv_heads, ...)."""
        y, queries = stacked(k, v).double(), q.double().unflatten(0, (self.kv_heads, -1)).flatten(1, 2)
        self.tokens, self.queries = self.tokens + len(y), self.queries + queries.shape[1]
        self.first, self.second = self.first + y.sum(0), self.second + y.T @ y
        self.asked = self.asked + queries.transpose(1, 2) @ queries

    @property
    def mean(self) -> Tensor:
        """Of y, (n,)."""
        return self.first / self.tokens

    @property
    def covariance(self) -> Tensor:
        """Of y, (n, n)."""
        return self.second / self.tokens - torch.outer(self.mean, self.mean)


def fit(moments: LatentMoments, rank: int, metric: Tensor | None = None) -> LatentMap:
    """The map of least squared error in a metric, on the calibration's tokens.

    Parameters
    ----------
    rank : int
        Numbers of a latent.
    metric : Tensor, shape (n, n), optional
        M, lower or upper triangular, invertible: errors e are weighed as the squared norm of M e.

    Raises
    ------
    UserError
        The rank is not within 1 and n.
    """
    n = len(moments.mean)
    if not 1 <= rank <= n:
        raise UserError(f"a latent of {rank} numbers for {n} of K and V; allowed: 1 to {n}")
    weigh = torch.eye(n, dtype=torch.float64, device=moments.mean.device) if metric is None else metric
    kept = torch.linalg.eigh(weigh @ moments.covariance @ weigh.T)[1][:, -rank:]
    upper = not bool(weigh.tril(-1).any())
    up = torch.linalg.solve_triangular(weigh, kept, upper=upper)
    return LatentMap(moments.mean, weigh.T @ kept, up, moments.kv_heads)


def attention_metric(moments: LatentMoments) -> Tensor:
    r"""What an error of a token's K and V costs attention's output, to first order, as a `metric` of `fit`.

    An error of V, weighed p, moves an output by p times itself. One of K moves the score by :math:`q \cdot e / \sqrt d`
    and the output by p times that times v's distance from the output, whose square is v's variance on average. So V's
    errors count as they are, and K's in the metric :math:`\mathrm{var}(v)\, E[q q^T] / d` of the queries that read that
    head: M is its Cholesky factor.
    """
    heads, d = moments.kv_heads, moments.asked.shape[-1]
    moment = moments.asked / moments.queries
    eye = torch.eye(d, dtype=moment.dtype, device=moment.device)
    spread = moments.covariance.diagonal()[heads * d :].unflatten(0, (heads, d)).sum(-1)[:, None, None]
    ridge = 1e-6 * moment.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * eye
    factors = torch.linalg.cholesky((moment + ridge) * spread / d).transpose(1, 2)
    return torch.block_diag(*factors, torch.eye(heads * d, dtype=moment.dtype, device=moment.device))

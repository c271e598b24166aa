"""What an error of K or of V does: the quadratic forms that its squared error is weighed by.

An error e of a key moves the score that a query q gives it, from `lag` tokens further on, by q^T R e, with R the
rotary embedding's rotation by that lag. Its mean square is e^T R^T Sigma_q R e: not that of Sigma_q alone, which
holds at lag 0 only, but that of Sigma_q turned by every lag that queries look back. An error e of a value
moves the layer's output by W_o e times the attention it gets, so that its square is weighed by W_o^T W_o.
"""

from __future__ import annotations

import torch
from torch import Tensor


def over_lags(sigma: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Sigma_q as keys meet it: the mean of R^T Sigma R over the lags, a lag weighing 1 / (1 + lag).

    The weights let every octave of distance count alike, as attention, which decays about so, does.

    Parameters
    ----------
    sigma : Tensor
        Second moments of queries before their rotation [heads, head_dim, head_dim].
    cos, sin : Tensor
        Of the rotary embedding at positions 0, 1, ...: [lags, pairs]. Dimension i turns with dimension
        i + pairs, dimensions from 2 * pairs on do not turn. They are moved to the device of `sigma`.

    Returns
    -------
    Tensor
        float64 [heads, head_dim, head_dim], symmetric.
    """
    sigma, total = sigma.double(), torch.zeros_like(sigma, dtype=torch.float64)
    weights = 1 / torch.arange(1, len(cos) + 1, dtype=torch.float64, device=sigma.device)
    for weight, c, s in zip(weights / weights.sum(), cos.to(sigma), sin.to(sigma), strict=True):
        half = rotated(sigma, c, s)
        total += weight * rotated(half.mT, c, s)
    return (total + total.mT) / 2


def rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R rows, the rotary embedding by halves: each row's pairs (a, b) become (a cos - b sin, b cos + a sin).

    Parameters
    ----------
    rows : Tensor
        [..., head_dim].
    cos, sin : Tensor
        [pairs] for one rotation of all rows, [tokens, pairs] for rows [..., tokens, head_dim], on their device.
        Dimension i turns with dimension i + pairs, dimensions from 2 * pairs on do not turn.
    """
    pairs = cos.shape[-1]
    a, b, rest = rows.split([pairs, pairs, rows.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def of_outputs(weight: Tensor, n_kv_heads: int, head_dim: int) -> Tensor:
    """W_o^T W_o of each KV head: the sum over the query heads that share its values.

    Parameters
    ----------
    weight : Tensor
        The attention's output projection [hidden, n_heads * head_dim].
    n_kv_heads, head_dim : int
        Query head j shares the values of KV head ``j // (n_heads / n_kv_heads)``.

    Returns
    -------
    Tensor
        float64 [n_kv_heads, head_dim, head_dim], symmetric.
    """
    columns = weight.double().unflatten(1, (n_kv_heads, -1, head_dim)).permute(1, 2, 0, 3).flatten(1, 2)
    return columns.mT @ columns


def ridged(metric: Tensor, ridge: float) -> Tensor:
    """`metric` [..., head_dim, head_dim] with `ridge` times its own diagonal added to the diagonal.

    Each channel gets its share of its own second moment, so that the ridge knows no unit: with D diagonal,
    D metric D is ridged to D (the ridged metric) D. A model may be rewritten with channels of Q times D and
    those of K over D without another function; what is coded in the metric's frame is then the same, and
    bit for bit where D holds powers of two. A ridge in units of the mean would drown the weak channels of one
    writing and not of the other. In units of the correlations, the least eigenvalue is at least `ridge`.
    Only a channel that nothing looks at, with zero on the diagonal, has no unit of its own: it gets the mean's.
    """
    diagonal = metric.diagonal(dim1=-2, dim2=-1)
    units = torch.where(diagonal > 0, diagonal, diagonal.mean(-1, keepdim=True))
    return metric + ridge * torch.diag_embed(units)

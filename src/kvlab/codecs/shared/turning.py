"""K after a part of its rotary embedding, its mean taken off: what calibration and pages mean by `rotary: after`.

The mean of K is known before the rotary embedding R_t of position t, so after it that of a token is R_t mean, which
attention gets from the position alone. What is about the mean is turned by how far a token is into its run of `RUN`
positions: of position t = b + s, where b is a multiple of `RUN`, what is coded is R_s (K - mean) + mean. So attention
turns a query back by b, once for each run, and no key. The shorter a run, the more K in it is alike, and the fewer bits
it needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.shared.metric import rotated
from kvlab.codecs.shared.moments import Moments

RUN = 128  # positions


def turned_about(k: Tensor, mean: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R_s (k - mean) + mean of K before its rotary embedding.

    Parameters
    ----------
    k : Tensor
        [heads, ..., tokens, head_dim].
    mean : Tensor
        [heads, head_dim].
    cos, sin : Tensor
        Of how far the tokens are into their runs [tokens, head_dim / 2]; see `metric.rotated`.
    """
    mean = mean.view(len(mean), *[1] * (k.dim() - 2), -1)
    return rotated(k - mean, cos, sin) + mean


def turned_moments(moments: Moments, heads: int, cos: Tensor, sin: Tensor) -> Moments:
    """Moments of R_s (K - mean) + mean over positions, of the moments of K, as if K were alike at all of them.

    Parameters
    ----------
    moments : Moments
        Of K before its rotary embedding, heads joined.
    heads : int
        Of K.
    cos, sin : Tensor
        Of the positions that are averaged over [positions, head_dim / 2].
    """
    _, mean, _ = moments.pooled()
    apart = moments.mean - mean
    second = moments.scatter + moments.count[:, None, None, None] * apart[..., :, None] * apart[..., None, :]
    second = over_positions(second, heads // len(mean), cos, sin)
    left = apart.unflatten(-1, (heads // len(mean), -1))
    left = rotated(left, cos.to(left).mean(0), sin.to(left).mean(0)).flatten(-2)
    scatter = second - moments.count[:, None, None, None] * left[..., :, None] * left[..., None, :]
    return Moments.holding(moments.tokens, moments.count, mean + left, scatter)


def over_positions(second: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """The mean of R_t S R_t^T over positions, R_t turning each head alike.

    A pair (a, b) that turns is z = a + ib, which R_t multiplies by a phase. So of two pairs E[z w*] is multiplied by
    the one's phase times the other's conjugate one, E[z w] by the product of both, and means of these are enough.

    Parameters
    ----------
    second : Tensor
        Second moments S, float64 [..., heads * head_dim, heads * head_dim], symmetric.
    heads : int
        That a row holds, each by halves.
    cos, sin : Tensor
        [positions, head_dim / 2].
    """
    phase = torch.complex(cos.double(), sin.double()).to(second.device).repeat(1, heads)
    parts = second.unflatten(-1, (heads, 2, -1)).unflatten(-4, (heads, 2, -1)).movedim((-5, -2), (0, 1))
    aa, ab, ba, bb = (parts[i, j].flatten(-4, -3).flatten(-2) for i in (0, 1) for j in (0, 1))
    apart = torch.complex(aa + bb, ba - ab) * (phase.mT @ phase.conj() / len(phase))
    alike = torch.complex(aa - bb, ba + ab) * (phase.mT @ phase / len(phase))
    blocks = [[(apart + alike).real, (alike - apart).imag], [(apart + alike).imag, (apart - alike).real]]
    whole = torch.stack([torch.stack(row) for row in blocks]) / 2
    whole = whole.unflatten(-1, (heads, -1)).unflatten(-3, (heads, -1)).movedim((0, 1), (-5, -2))
    return whole.flatten(-3).flatten(-4, -2)

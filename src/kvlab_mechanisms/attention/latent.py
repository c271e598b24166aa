r"""Multi-head latent attention over a cache of latents, in absorbed form.

DeepSeek-V2 (arXiv 2405.04434, section 2.1). A token's latent c of L numbers, from which every head's key and value are
made, :math:`k_h = c\, U_h`, :math:`v_h = c\, V_h` with U_h, V_h of shape (L, d), is all that is stored, with one
rotated key k^r of d_r numbers that all heads share. Matrix products associate, so that no key or value has to be made:

.. math:: \tilde q_h = q_h U_h^T, \qquad s_h = (\tilde q_h C^T + q^r_h {K^r}^T) / \sqrt{d + d_r}, \qquad
          o_h = (\mathrm{softmax}(s_h)\, C)\, V_h .

A step over S tokens takes 4 H S L + 4 H d L operations, where making all keys and values takes 4 S L H d. Exact only
for keys that are not rotated after they were made; see `latent_svd` for models that rotate them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.core.errors import LayoutMismatch, PoolExhausted


@dataclass(frozen=True)
class LatentWeights:
    """What makes keys and values of a latent, by head.

    Parameters
    ----------
    up_k, up_v : Tensor, shape (heads, latent, head_dim)
    rope : int
        Numbers of the shared rotated key; 0 for none.
    """

    up_k: Tensor
    up_v: Tensor
    rope: int = 0

    @classmethod
    def absorb(cls, w_uk: Tensor, w_uv: Tensor, heads: int, rope: int = 0) -> LatentWeights:
        """From matrices of shape (latent, heads * head_dim), laid out once as the products need them."""
        if w_uk.shape != w_uv.shape or w_uk.shape[1] % heads:
            raise LayoutMismatch(f"{tuple(w_uk.shape)} and {tuple(w_uv.shape)} are not of {heads} heads of one width")
        up = [w.unflatten(1, (heads, -1)).transpose(0, 1).contiguous() for w in (w_uk, w_uv)]
        return cls(*up, rope)

    @property
    def width(self) -> int:
        """Numbers that a token stores."""
        return self.up_k.shape[1] + self.rope

    @property
    def scale(self) -> float:
        """Of the scores."""
        return (self.up_k.shape[2] + self.rope) ** -0.5


class LatentCache:
    """Latents of the tokens so far.

    Parameters
    ----------
    width : int
        Numbers of a token: latent and rotated key.
    batch : int
    capacity : int, optional
        Tokens that it may hold; without, it doubles when it is full.
    dtype : torch.dtype
    """

    def __init__(self, width: int, batch: int = 1, capacity: int | None = None, dtype: torch.dtype = torch.float32):
        self._held, self._fixed, self.tokens = torch.zeros(batch, capacity or 16, width, dtype=dtype), capacity, 0

    @property
    def rows(self) -> Tensor:
        """What is held, (batch, tokens, width)."""
        return self._held[:, : self.tokens]

    @property
    def nbytes(self) -> int:
        """Of what is held."""
        return self.rows.numel() * self._held.itemsize

    def append(self, x: Tensor) -> None:
        """Take up one or many tokens, (batch, tokens, width).

        Raises
        ------
        LayoutMismatch
            They are of another shape.
        PoolExhausted
            They do not fit into a fixed capacity; nothing was taken.
        """
        if x.dim() != 3 or x.shape[0] != self._held.shape[0] or x.shape[2] != self._held.shape[2]:
            expected = f"({self._held.shape[0]}, tokens, {self._held.shape[2]})"
            raise LayoutMismatch(f"latents are {tuple(x.shape)}; allowed: {expected}")
        due = self.tokens + x.shape[1]
        if self._fixed is not None and due > self._fixed:
            raise PoolExhausted(f"{due} latents do not fit into a cache of {self._fixed}")
        if due > self._held.shape[1]:
            grown = self._held.new_zeros(self._held.shape[0], max(due, 2 * self._held.shape[1]), self._held.shape[2])
            grown[:, : self.tokens] = self.rows
            self._held = grown
        self._held[:, self.tokens : due] = x
        self.tokens = due

    def reset(self) -> None:
        """Forget all."""
        self.tokens = 0


def attend_latent(q: Tensor, cache: Tensor, weights: LatentWeights, allowed: Tensor | None = None) -> Tensor:
    """Absorbed attention.

    Parameters
    ----------
    q : Tensor, shape (batch, heads, queries, head_dim + rope)
    cache : Tensor, shape (batch, tokens, latent + rope)
    allowed : Tensor of bool, shape (queries, tokens), optional
        What each query reads; all of it where it is left out, as a decoding step does.

    Returns
    -------
    Tensor, shape (batch, heads, queries, head_dim)

    Raises
    ------
    LayoutMismatch
        The cache is empty, or is of other weights.
    """
    c, k_rope, q_plain, q_rope = _split(q, cache, weights)
    found = (q_plain @ weights.up_k.transpose(1, 2)) @ c.transpose(2, 3) + q_rope @ k_rope.transpose(2, 3)
    return (_weights(found, weights, allowed) @ c) @ weights.up_v


def attend_naive(q: Tensor, cache: Tensor, weights: LatentWeights, allowed: Tensor | None = None) -> Tensor:
    """The same by making every key and value first: what `attend_latent` is held against."""
    c, k_rope, q_plain, q_rope = _split(q, cache, weights)
    k, v = c @ weights.up_k, c @ weights.up_v
    found = q_plain @ k.transpose(2, 3) + q_rope @ k_rope.transpose(2, 3)
    return _weights(found, weights, allowed) @ v


def _weights(found: Tensor, weights: LatentWeights, allowed: Tensor | None) -> Tensor:
    scores = found * weights.scale
    return (scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))).softmax(-1)


def _split(q: Tensor, cache: Tensor, weights: LatentWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents and rotated keys (batch, 1, tokens, .), and both parts of the queries."""
    heads, latent, head_dim = weights.up_k.shape
    if not cache.shape[1] or cache.shape[2] != weights.width or q.shape[1::2] != (heads, head_dim + weights.rope):
        raise LayoutMismatch(
            f"queries {tuple(q.shape)} cannot read a latent cache of {tuple(cache.shape)}", code="layout.latent-queries"
        )
    parts = cache[:, None].split([latent, weights.rope], dim=-1)
    return (*parts, *q.split([head_dim, weights.rope], dim=-1))


def ratio(kv_heads: int, head_dim: int, width: int, kv_itemsize: int = 2, itemsize: int = 2) -> float:
    """Bytes of K and V over bytes of latents, for each token and layer."""
    return 2 * kv_heads * head_dim * kv_itemsize / (width * itemsize)

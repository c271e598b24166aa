"""Layers whose weights are split between ranks (Megatron-LM, Shoeybi et al. 2019, 1909.08053, section 3).

A layer that is split by columns needs nothing from the others, one that is split by rows a sum; so the two after one
another need one sum. Attention is such a pair, split by heads: a rank holds K and V of its own heads alone, and codes
them by itself. `share` says which heads those are, `cut` takes what was fitted for them out of a calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.errors import CapabilityError, UserError
from kvlab_mechanisms.cluster.ranks import Ranks, even

Coding = Callable[[Tensor, Site], Tensor]
"""K or V [heads, tokens, head_dim] as a codec gives it back."""


@dataclass(frozen=True)
class Share:
    """The heads of one rank, next to one another.

    Attributes
    ----------
    q, kv : slice
        Query heads, and the KV heads that they read. Where there are more ranks than KV heads, several ranks hold the
        same one: a rank's cache grows no smaller then.
    """

    q: slice
    kv: slice

    @property
    def kv_heads(self) -> int:
        """How many KV heads lie here."""
        return self.kv.stop - self.kv.start

    def kv_bytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Bytes of K and V of a layer on this rank."""
        return 2 * self.kv_heads * tokens * head_dim * itemsize


def share(heads: int, kv_heads: int, world: int, rank: int) -> Share:
    """The share of one rank.

    Raises
    ------
    UserError
        The heads cannot be split so that each rank has equally many, and the KV heads that they read.
    """
    if heads % kv_heads or heads % world or (kv_heads % world and world % kv_heads):
        allowed = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise UserError(
            f"{heads} query heads over {kv_heads} KV heads cannot be split between {world} ranks; allowed:"
            f" {', '.join(map(str, allowed))}",
            code="user.heads-not-split",
        )
    each, kv_each = heads // world, max(kv_heads // world, 1)
    first = rank * kv_heads // world
    return Share(slice(rank * each, (rank + 1) * each), slice(first, first + kv_each))


def cut(calibration: StreamCalibration, heads: slice) -> StreamCalibration:
    """What was fitted for some KV heads, out of what was fitted for all.

    Whiteners and what attention makes of V stand by head, tables of the codec are of all heads; each serves the heads
    as it serves them among the others, so that codes of a part are a part of the codes.

    Raises
    ------
    CapabilityError
        It holds what was fitted over heads together (`klt`'s components, a codec's own fit), which is of no head alone.
    """
    if calibration.components or calibration.own or calibration.spectra:
        raise CapabilityError(
            "this calibration was fitted over the heads of a layer together, so its codec cannot be cut between ranks;"
            " code on one rank, or take a codec of single heads: hadamard, int, kivi, nf4, fp8",
            code="capability.heads-together",
        )
    whiteners = {n: Whitener(one.chol[heads], one.inv_chol[heads]) for n, one in calibration.whiteners.items()}
    outputs = {n: one[heads] for n, one in calibration.outputs.items()}
    return replace(calibration, whiteners=whiteners, outputs=outputs)


class ColumnLinear:
    """``x @ W.T`` with the rows of W, the columns of what comes out, split between ranks.

    Parameters
    ----------
    weight : Tensor
        The whole [out, in]; this rank keeps its part. Where `out` does not divide, the first ranks have one more.
    """

    def __init__(self, ranks: Ranks, weight: Tensor):
        self.ranks, self.sizes = ranks, even(len(weight), ranks.world)
        self.weight = weight.split(self.sizes)[ranks.rank].to(ranks.device)

    def __call__(self, x: Tensor, gather: bool = False) -> Tensor:
        """[tokens, in] to this rank's [tokens, out / n], or to all of it on every rank."""
        y = F.linear(x.to(self.ranks.device), self.weight)
        return self.ranks.all_gather(y, y.dim() - 1, self.sizes) if gather else y


class RowLinear:
    """``x @ W.T`` with the columns of W, and of what comes in, split between ranks; one sum makes it whole.

    Parameters
    ----------
    weight : Tensor
        The whole [out, in].
    """

    def __init__(self, ranks: Ranks, weight: Tensor):
        self.ranks = ranks
        self.weight = weight.split(even(weight.shape[1], ranks.world), 1)[ranks.rank].to(ranks.device)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's [tokens, in / n] to the whole [tokens, out], on every rank."""
        if x.shape[-1] != self.weight.shape[1]:
            raise UserError(f"this rank has {self.weight.shape[1]} columns of the weight; {x.shape[-1]} came in")
        return self.ranks.all_reduce(F.linear(x, self.weight))


@dataclass(frozen=True)
class AttentionWeights:
    """Of an attention layer, whole: q [heads * d, hidden], k and v [kv_heads * d, hidden], o [hidden, heads * d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    head_dim: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return len(self.q) // self.head_dim

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return len(self.k) // self.head_dim

    def to(self, device: torch.device) -> AttentionWeights:
        """The same on a device."""
        moved = (one.to(device) for one in (self.q, self.k, self.v, self.o))
        return AttentionWeights(*moved, self.head_dim)

    def of(self, part: Share) -> AttentionWeights:
        """Those of a rank's heads."""
        q, kv = (slice(s.start * self.head_dim, s.stop * self.head_dim) for s in (part.q, part.kv))
        return AttentionWeights(self.q[q], self.k[kv], self.v[kv], self.o[:, q], self.head_dim)


def attention(
    ranks: Ranks, x: Tensor, weights: AttentionWeights, coding: Coding | None = None, layer: int = 0
) -> Tensor:
    """Causal attention over a text, split by heads.

    Parameters
    ----------
    x : Tensor
        [tokens, hidden], the same on every rank.
    coding : callable, optional
        What this rank's K and V go through; of its own heads, see `cut`.

    Returns
    -------
    Tensor
        [tokens, hidden], the same bits on every rank.
    """
    own = weights.of(share(weights.heads, weights.kv_heads, ranks.world, ranks.rank))
    return ranks.all_reduce(partial(x.to(ranks.device), own.to(ranks.device), coding, layer))


def partial(x: Tensor, own: AttentionWeights, coding: Coding | None = None, layer: int = 0) -> Tensor:
    """What some heads add to attention, [tokens, hidden]; with all heads it is attention itself."""
    # each [heads, tokens, head_dim]
    q, k, v = (F.linear(x, weight).unflatten(1, (-1, own.head_dim)).transpose(0, 1) for weight in (own.q, own.k, own.v))
    if coding:
        k, v = (coding(one, Site(0, layer, stream)).to(one.dtype) for one, stream in ((k, "k"), (v, "v")))
    return F.linear(attend(q, k, v).transpose(0, 1).flatten(1), own.o)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Attention of [heads, tokens, head_dim] over [kv_heads, keys, head_dim], heads next to one another sharing one."""
    groups = len(q) // len(k)
    k, v = (one.repeat_interleave(groups, 0) for one in (k, v))
    if not causal or q.shape[1] == k.shape[1]:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]
    rows = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    mask = torch.arange(k.shape[1], device=q.device)[None] <= rows
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]

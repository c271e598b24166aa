r"""Attention over summaries of past chunks, in one softmax.

A chunk c of n tokens that lies in the past is read as one key and one value: its mean key and a mean of its values,
with the logit of a query q

.. math:: \ell_c = q \cdot \bar k_c / \sqrt d + \ln n_c ,

which is exact where the chunk's keys are equal: n equal terms of a softmax are one of n times the weight. The query's
own chunk, `exact` ones before it and the `sinks` first are read as they are. Of the other past chunks the `top_k` with
the largest logits are read, summed over the query heads of a group. Each query chooses by itself. (The mean of keys
that were rotated to different positions is shorter than they are: the longer a chunk, the less its summary weighs.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.attention.grouped import causal, grouped, positions
from kvlab.attention.patterns import ChunkSummary


class Summaries(NamedTuple):
    """Of whole chunks, (batch, kv_heads, chunks, head_dim) each: a key and a value."""

    key: Tensor
    value: Tensor


def summaries_of(k: Tensor, v: Tensor, chunk: int) -> Summaries:
    """The mean key and the mean value of each whole chunk of k, v (batch, kv_heads, keys, head_dim)."""
    whole = k.shape[2] // chunk * chunk
    if not whole:
        return Summaries(k[:, :, :0], v[:, :, :0])
    return Summaries(*(x[:, :, :whole].unflatten(2, (-1, chunk)).mean(3) for x in (k, v)))


class SummaryRead(NamedTuple):
    """What each query reads: keys (queries, keys), and chunks by their summaries (batch, kv_heads, queries, chunks)."""

    keys: Tensor
    chunks: Tensor


def reads(q: Tensor, k: Tensor, pattern: ChunkSummary, known: Summaries, scale: float) -> SummaryRead:
    """What each query reads."""
    at, count = positions(q, k), known.key.shape[2]
    own, place = at // pattern.chunk, torch.arange(k.shape[2], device=q.device) // pattern.chunk
    exact = (place[None] >= own[:, None] - pattern.exact) | (place < pattern.sinks)[None]
    number = torch.arange(count, device=q.device)
    eligible = (number[None] < own[:, None] - pattern.exact) & (number >= pattern.sinks)[None]
    found = grouped(q, k.shape[1]).sum(2) @ known.key.transpose(2, 3) * scale
    best = found.masked_fill(~eligible, float("-inf")).topk(min(pattern.top_k, count), dim=-1)
    chunks = torch.zeros_like(found, dtype=torch.bool).scatter_(3, best.indices, best.values > float("-inf"))
    return SummaryRead(exact & causal(at, k.shape[2]), chunks)


def attend_summaries(
    q: Tensor, k: Tensor, v: Tensor, pattern: ChunkSummary, scale: float | None = None, known: Summaries | None = None
) -> Tensor:
    """Attention of queries that are the last of the tokens.

    Parameters
    ----------
    q : Tensor, shape (batch, heads, queries, head_dim)
    k, v : Tensor, shape (batch, kv_heads, keys, head_dim)
    known : Summaries, optional
        Of k and v, where they are there already.

    Returns
    -------
    Tensor, shape (batch, heads, queries, head_dim)
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    known = known or summaries_of(k, v, pattern.chunk)
    read = reads(q, k, pattern, known, scale)
    queries = grouped(q, k.shape[1])
    exact = (queries @ k.transpose(2, 3)[:, :, None] * scale).masked_fill(~read.keys, float("-inf"))
    many = torch.log(torch.tensor(float(pattern.chunk))).item()
    summed = queries @ known.key.transpose(2, 3)[:, :, None] * scale + many
    summed = summed.masked_fill(~read.chunks[:, :, None], float("-inf"))
    weights = torch.cat([exact, summed], dim=-1).softmax(-1)
    near, far = weights.split([k.shape[2], known.key.shape[2]], dim=-1)
    return (near @ v[:, :, None] + far @ known.value[:, :, None]).flatten(1, 2)

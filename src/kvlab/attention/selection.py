"""Which tokens of a context stay when there is no room for all: scores, and one rule that chooses by them.

Used before a prefill, on a prompt that is to be shorter, or on a cache, whose gaps `compaction` closes. All of it
loses something, and what it loses is to be measured like any codec's loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvlab.core.counts import counted
from kvlab.core.errors import LayoutMismatch


def select(scores: Tensor, budget: int, sinks: int = 0, recent: int = 0) -> Tensor:
    """Positions that stay, rising: the first and the last ones, then those of the highest score; of equals the earlier.

    Parameters
    ----------
    scores : Tensor
        [tokens], the higher the longer a token stays.
    budget : int
        Tokens that stay, at most all. The last ones come before the first ones where it has no room for both.
    sinks, recent : int
        How many of the first (attention sinks, Xiao et al. 2024, arXiv 2309.17453) and of the last tokens stay in any
        case.

    Returns
    -------
    Tensor
        int64 [min(tokens, budget)].
    """
    if scores.dim() != 1:
        raise LayoutMismatch(f"scores are one number for each token, not {list(scores.shape)}")
    tokens = len(scores)
    budget = min(tokens, counted("budget", budget))
    recent = min(counted("recent", recent), budget)
    sinks = min(counted("sinks", sinks), budget - recent)
    order = torch.argsort(scores[sinks : tokens - recent], descending=True, stable=True)
    middle = order[: budget - sinks - recent] + sinks
    return torch.cat([torch.arange(sinks), middle.sort().values, torch.arange(tokens - recent, tokens)])


def latest(tokens: int, budget: int, sinks: int = 0) -> Tensor:
    """What `select` keeps by `recency`, without scores."""
    budget = min(tokens, counted("budget", budget))
    sinks = min(counted("sinks", sinks), budget)
    last = torch.arange(tokens - budget + sinks, tokens)
    return torch.cat([torch.arange(sinks), last]) if sinks else last


def recency(tokens: int) -> Tensor:
    """The later, the higher [tokens]: a sliding window, after the sinks StreamingLLM's."""
    return torch.arange(tokens, dtype=torch.float64)


def stride(tokens: int, budget: int) -> Tensor:
    """1 at `budget` tokens at even distances, 0 between [tokens]: the control that knows nothing of the text."""
    scores = torch.zeros(tokens, dtype=torch.float64)
    if tokens and budget:
        scores[torch.linspace(0, tokens - 1, min(budget, tokens), dtype=torch.float64).round().long()] = 1
    return scores


def small_keys(k: Tensor) -> Tensor:
    """Minus the mean L2 norm of a token's keys [tokens], from K [kv_heads, tokens, head_dim].

    Keys of small norm draw much attention (Devoto et al. 2024, arXiv 2406.11430, section 3).
    """
    return -torch.linalg.vector_norm(k.float(), dim=-1).mean(0)


def large_embeddings(x: Tensor) -> Tensor:
    """L2 norm of each token's embedding [tokens], from [tokens, width]; a control without a theory."""
    return torch.linalg.vector_norm(x.float(), dim=-1)


def self_information(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p of each token after those before it, in nats [tokens] (Li et al. 2023, arXiv 2310.06201, section 3.1).

    Parameters
    ----------
    logits : Tensor
        [tokens, vocabulary], of the tokens after each; the first token, which nothing predicts, counts as certain to
        stay.
    ids : Tensor
        int64 [tokens].
    """
    told = functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="none")
    return torch.cat([torch.full((1,), torch.inf, dtype=torch.float64), told])


def pooled_attention(weights: Tensor, width: int = 7) -> Tensor:
    """Attention of the last queries, smoothed over neighbours (SnapKV; Li et al. 2024, arXiv 2404.14469, section 4).

    Parameters
    ----------
    weights : Tensor
        [heads, queries, tokens], each query's over all tokens.
    width : int
        Tokens that the largest mean weight of one spreads over, odd: what stays stays in phrases.

    Returns
    -------
    Tensor
        float64 [tokens].
    """
    if width % 2 == 0:
        raise LayoutMismatch(f"the width of the pooling has to be odd, not {width}", code="layout.even-width")
    mean = weights.double().mean(dim=(0, 1))
    return functional.max_pool1d(mean[None, None], width, stride=1, padding=width // 2)[0, 0]


def tf_idf(segments: Sequence[Sequence[Hashable]]) -> Tensor:
    """Each token's weight in its segment, segments of unit length [tokens of all segments].

        weight = tf * (ln((1 + N) / (1 + df)) + 1),    divided by the L2 norm of its segment's weights

    with tf the times that the token stands in its segment, df the segments that it stands in, and N their number: the
    smoothed form of scikit-learn's TfidfVectorizer. Segments are sentences or lines.
    """
    stands_in = Counter(token for segment in segments for token in set(segment))
    idf = {
        token: float(torch.log(torch.tensor((1 + len(segments)) / (1 + n), dtype=torch.float64))) + 1
        for token, n in stands_in.items()
    }
    scores: list[float] = []
    for segment in segments:
        weights = {token: times * idf[token] for token, times in Counter(segment).items()}
        length = sum(weight**2 for weight in weights.values()) ** 0.5
        scores += [weights[token] / length for token in segment]
    return torch.tensor(scores, dtype=torch.float64)

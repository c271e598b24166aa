"""Several samples of one prompt, and the order in which to take them: likely ones first, unlike ones before like ones.

Best-of-n as in Stiennon et al. 2020 (2009.01325, section 4) with the model's own probability for a reward, normalised
for length as in Wu et al. 2016 (1609.08144, equation 14, with the plain power of the length), and maximal marginal
relevance for the order (Carbonell & Goldstein 1998, SIGIR). For a sample y of m tokens and embedding e,

.. math:: s(y) = \\frac{\\sum_t \\log p(y_t | y_{<t})}{m^\\alpha}, \\qquad
    \\text{next} = \\arg\\max_i \\; s_i + w \\, (1 - \\max_{j \\text{ taken}} \\cos(e_i, e_j))

The samples share one prefix (`shared_prefix`). Taking the likeliest of n leans towards the mode: at one token, drawn
with replacement and w = 0, the token of rank r is taken with probability (1 - F_{r-1})^n - (1 - F_r)^n, F_r being the
mass of the r likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvlab.core.errors import CapabilityError, ParamsError
from kvlab_mechanisms.decoding.law import Sampling, law
from kvlab_mechanisms.decoding.sampler import NOISE, sample, uniforms


@dataclass(frozen=True)
class Sample:
    """One continuation.

    Attributes
    ----------
    tokens : list of int
        To its stop, if there is one.
    log_prob : float
        Of all of them under the model without temperature or filters, nats.
    score : float
        `log_prob` over the length to the power alpha.
    embedding : Tensor [width]
        Mean of the model's embeddings of its tokens.
    """

    tokens: list[int]
    log_prob: float
    score: float
    embedding: Tensor


@dataclass(frozen=True)
class Samples:
    """All continuations of a prompt, the one to take first in front.

    Attributes
    ----------
    nbytes, prefix_bytes : int
        Of the cache at the end, and of the prefix in it.
    """

    samples: list[Sample]
    nbytes: int
    prefix_bytes: int

    @property
    def independent_bytes(self) -> int:
        """What as many caches without a shared prefix would hold."""
        return self.nbytes + (len(self.samples) - 1) * self.prefix_bytes


@torch.no_grad()
def best_of_n(
    model: nn.Module,
    prompt: Sequence[int],
    n: int,
    tokens: int,
    own: Sampling,
    *,
    stop: Sequence[int] = (),
    alpha: float = 1.0,
    diversity: float = 0.0,
    cache: Cache | None = None,
) -> Samples:
    """Continuations of a prompt of at least two tokens.

    Parameters
    ----------
    n, tokens : int
        Samples, and the most tokens of each.
    own : Sampling
        The i-th sample draws with ``own.seed + i``: it is what it would be alone.
    stop : sequence of int
        Tokens that end a sample; they belong to it.
    alpha, diversity : float
        See the module.
    cache : Cache or None
        Empty; the prefix is read from it once, so with a `KVCache` all samples go on from a coded prompt.
    """
    if n < 1 or tokens < 1 or len(prompt) < 2:
        raise ParamsError(f"{n} samples of {tokens} tokens after {len(prompt)}; allowed: from 1, from 1, from 2")
    first = DynamicCache(config=model.config) if cache is None else cache
    read = torch.tensor([list(prompt[:-1])], device=model.device)
    model(read, past_key_values=first, use_cache=True, logits_to_keep=1)
    shared, embed = SharedPrefixCache.of(first), model.get_input_embeddings().weight
    made = []
    for text, log_prob in _grown(model, shared, prompt, n, tokens, own, stop):
        made.append(Sample(text, log_prob, log_prob / len(text) ** alpha, embed[text].mean(0)))
    order = ranked([one.score for one in made], torch.stack([one.embedding for one in made]), diversity)
    return Samples([made[i] for i in order], shared.nbytes, shared.prefix_bytes)


def _grown(
    model: nn.Module,
    shared: SharedPrefixCache,
    prompt: Sequence[int],
    n: int,
    tokens: int,
    own: Sampling,
    stop: Sequence[int],
) -> list[tuple[list[int], float]]:
    """The tokens of each sample and their log-probability; rows that have ended are run on and not looked at."""
    settings = [replace(own, seed=own.seed + i) for i in range(n)]
    texts, told, growing = [list(prompt) for _ in range(n)], np.zeros(n), np.ones(n, bool)
    for step in range(tokens):
        given = torch.tensor([text[-1:] for text in texts], device=model.device)
        logits = model(given, past_key_values=shared, use_cache=True).logits[:, -1]
        new = sample(logits, settings, [step] * n, [torch.tensor(text) for text in texts]).to(logits.device)
        told += growing * torch.log_softmax(logits.double(), -1).gather(1, new[:, None])[:, 0].cpu().numpy()
        for text, token in zip(texts, new.tolist(), strict=True):
            text.append(token)
        growing &= np.array([text[-1] not in stop for text in texts])
        if not growing.any():
            break
    return [(_until(text[len(prompt) :], stop), float(log_prob)) for text, log_prob in zip(texts, told, strict=True)]


def _until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """Up to the first stop and with it."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))]


def ranked(scores: Sequence[float], embeddings: Tensor, weight: float) -> list[int]:
    """Indices in the order of maximal marginal relevance.

    Parameters
    ----------
    embeddings : Tensor [n, width]
    weight : float
        Of being unlike what is taken already; at 0 the order is that of the scores, of equals the first in front.
    """
    unit = nn.functional.normalize(embeddings.double(), dim=1)
    cosines, left, taken = (unit @ unit.T).cpu().numpy(), list(range(len(scores))), []
    while left:
        gains = [scores[i] + weight * (1 - cosines[i, taken].max() if taken else 0) for i in left]
        taken.append(left.pop(int(np.argmax(gains))))
    return taken


def candidates(logits: Tensor, n: int, own: Sampling, step: int = 0, *, replacement: bool = True) -> np.ndarray:
    """Token candidates for each row.

    With replacement they are independent draws; without, Gumbel's top n (Vieira 2014; Kool et al. 2019, 1903.06059,
    section 2): the n greatest of log p + g, g of Gumbel's law, are draws one after the other without replacement.

    Parameters
    ----------
    logits : Tensor [rows, vocabulary]
        Rows of one request each; the i-th draws with ``own.seed + i``.

    Returns
    -------
    int64 [rows, n]
    """
    found = law(logits, [own] * len(logits))
    rows = []
    for i, (ids, p) in enumerate(zip(found.ids, found.p, strict=True)):
        if replacement:
            up_to = torch.from_numpy(p).cumsum(0).numpy()  # in a third of numpy's time
            u = uniforms(own.seed + i, step, n, NOISE) * up_to[-1]
            rows.append(ids[np.minimum(np.searchsorted(up_to, u, side="right"), np.flatnonzero(p)[-1])])
            continue
        if np.count_nonzero(p) < n:
            raise ParamsError(
                f"{n} different candidates of {np.count_nonzero(p)} that the filters leave; ask for fewer",
                code="params.too-few-candidates",
            )
        ids, p = ids[p > 0], p[p > 0]
        with np.errstate(divide="ignore"):
            gumbel = -np.log(-np.log(uniforms(own.seed + i, step, len(p), NOISE)))
        rows.append(ids[np.argsort(-(np.log(p) + gumbel), kind="stable")[:n]])
    return np.stack(rows)


def best_token(logits: Tensor, n: int, own: Sampling, step: int = 0) -> np.ndarray:
    """The likeliest of n draws with replacement, for each row [rows]: w = 0 above."""
    drawn = candidates(logits, n, own, step)
    at = logits.detach().cpu().numpy()[np.arange(len(drawn))[:, None], drawn].argmax(1)
    return drawn[np.arange(len(drawn)), at]


# A cache whose rows begin with one prefix, held once: parallel samples of a prompt.


class SharedLayer(DynamicLayer):
    """K and V of one layer: a prefix [1, heads, tokens, head_dim], and what the rows wrote since."""

    def __init__(self, k: Tensor, v: Tensor):
        super().__init__()
        self.prefix = k, v

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Store new tokens [rows, heads, tokens, head_dim]; all that attention is to see, for this call alone."""
        own = super().update(key_states, value_states, *args, **kwargs)
        rows = len(key_states)
        return tuple(
            torch.cat([prefix.to(mine).expand(rows, -1, -1, -1), mine], dim=2)
            for prefix, mine in zip(self.prefix, own, strict=True)
        )

    def get_seq_length(self) -> int:
        """Tokens of each row, those of the prefix included."""
        return self.prefix[0].shape[2] + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: samples only grow."""
        raise CapabilityError(
            "parallel samples cannot be cropped; begin anew from the prefix", code="capability.no-crop"
        )

    @property
    def own_bytes(self) -> int:
        """Of what the rows wrote."""
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0


class SharedPrefixCache(Cache):
    """Rows that share one prefix.

    Parameters
    ----------
    layers : sequence of (Tensor, Tensor)
        K, after its rotary embedding, and V of the prefix by layer [1, heads, tokens, head_dim]: those of an ordinary
        cache, or `KVCache.decoded(layer)`, so that the samples go on from a coded prefix.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]]):
        if any(len(k) != 1 for k, _ in layers):
            raise CapabilityError(
                "a shared prefix is one row; take it from a cache of one text", code="capability.prefix-rows"
            )
        super().__init__(layers=[SharedLayer(k, v) for k, v in layers])

    @classmethod
    def of(cls, cache: Cache) -> SharedPrefixCache:
        """The first row of a transformers cache of tensors, or of a `KVCache`, as the prefix; nothing is copied."""
        if hasattr(cache, "decoded"):
            return cls([cache.decoded(layer) for layer in range(len(cache.layers))])
        return cls([(layer.keys[:1], layer.values[:1]) for layer in cache.layers])

    @property
    def prefix_bytes(self) -> int:
        """Of the prefix, once."""
        return sum(part.nbytes for layer in self.layers for part in layer.prefix)

    @property
    def nbytes(self) -> int:
        """Of everything that is held."""
        return self.prefix_bytes + sum(layer.own_bytes for layer in self.layers)

"""One sequence on a paged model: prefill and greedy decoding, over a pool that may hold a part of it.

While prefilling, forwards are cut where chunks end: one chunk a forward, never shrunk or shifted. Whoever begins at a
chunk's first token therefore does the very forwards that a run from nothing does from there on, in the same shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvlab.core.counts import counted
from kvlab.core.errors import CapabilityError, PagerError, UserError
from kvlab.kvstore.hf.model import PagedModel, refuse_length, refuse_tokens
from kvlab.kvstore.hf.queries import LastQueries, attention_mass
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import K
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import AttentionSeen, Policy, build
from kvlab.kvstore.paging.residents import Moves
from kvlab.kvstore.paging.scorer import Scorer
from kvlab.kvstore.snapshot.chain import links


@dataclass(frozen=True)
class Decoded:
    """What greedy decoding wrote.

    Attributes
    ----------
    tokens : tuple of int
    logits : Tensor
        float32 [len(tokens), vocab]; each token is the most likely one of its row.
    """

    tokens: tuple[int, ...]
    logits: Tensor


class Forwards:
    """One sequence; see `run.PagedRun`, which can be saved and restored too.

    Attributes
    ----------
    pager : Pager
    tokens : list of int
        All that the model has seen.
    chain : tuple of bytes
        Links of the sealed chunks.
    """

    def __init__(
        self,
        model: PagedModel,
        config: PagerConfig,
        policy: Policy | str = "lru",
        *,
        every: int = 64,
        salt: str = "",
        seed: int = 0,
        order: str = "logical",
        block_order: Sequence[int] | None = None,
    ):
        geometry = model.geometry(config.chunk_tokens)
        policy = build(policy, geometry, seed) if isinstance(policy, str) else policy
        pager = Pager(geometry, config, policy, model.device, block_order=block_order)
        self._begin(model, pager, every, salt, order)

    def _begin(self, model: PagedModel, pager: Pager, every: int, salt: str, order: str) -> None:
        """With this pager, and nothing known yet of what may lie in it."""
        self.model, self.every, self.salt = model, counted("every", every, least=1), salt
        self._queries = LastQueries(model) if pager.policy.needs else None
        self.tokens: list[int] = []
        self.chain: tuple[bytes, ...] = ()
        self._exact = self._complete = self._scored_at = 0
        self._touched = False
        self._last: Tensor | None = None
        self._hold(pager, order)
        if (scorer := self._scorer) is not None:
            scorer.keep(())  # whatever another request left behind

    @property
    def exact(self) -> int:
        """Tokens from the first on, whole chunks, that a cold run of the same tokens would leave in the same bits.

        And with the same chunks in the pool, where not all of them are. Tokens that were decoded, or prefilled in
        several calls that do not meet where a chunk ends, came in other batch shapes, and what stands after them
        read them. Neither is it known what a cold run would have in the pool, once chunks were moved, asked for,
        scored or pinned by hand, or restored from another pool.
        """
        return min(self._exact, self._complete) if self.by_hand else self._exact

    @property
    def by_hand(self) -> bool:
        """Whether anyone but this run's own forwards has moved, asked for, scored or pinned chunks of its pager."""
        return self._touched or bool(self.pager.pins) or _state(self.pager) != self._left

    @property
    def policy(self) -> Policy:
        """Who stays in the pool."""
        return self.pager.policy

    @property
    def logits(self) -> Tensor | None:
        """float32 [vocab] after the last token; None before the first forward."""
        return self._last

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Prefill.

        Parameters
        ----------
        tokens : sequence of int
            At least one.

        Returns
        -------
        Tensor
            float32 [vocab], the logits after the last token.

        Raises
        ------
        UserError, ModelError, PagerError
            See `check`.
        NonFinite
            When a logit is NaN or infinite. The run cannot go on then.
        """
        for part in self._parts(tokens):
            self._forward(part, keep=1)
        return self._last

    def score(self, tokens: Sequence[int]) -> Tensor:
        """The same forwards, with the logits after every token: float32 [len(tokens), vocab]."""
        return torch.cat([self._forward(part, keep=len(part)) for part in self._parts(tokens)])

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse what `extend` would refuse, and do nothing else.

        Raises
        ------
        PagerError
            An earlier forward has failed midway.
        UserError, ModelError
            See `refuse_tokens`.
        """
        self._refuse_broken()
        refuse_tokens(self.model, tokens, len(self.tokens))

    def decode(self, n: int, *, stop: Collection[int] = ()) -> Decoded:
        """Greedy decoding, one token a forward; every token that is written has been read too.

        Parameters
        ----------
        n : int
            Tokens, from 1.
        stop : collection of int
            Tokens after which decoding ends, themselves written.

        Raises
        ------
        UserError
            When nothing was prefilled, so that no logits are there to begin with.
        ModelError
            When the model has too few positions.
        """
        if self._last is None:
            raise UserError("there are no logits to decode from; prefill at least one token", code="user.no-logits")
        self._refuse_broken()
        refuse_length(self.model, len(self.tokens) + counted("n", n, least=1))
        written, logits = [], []
        while len(written) < n and not (written and written[-1] in stop):
            logits.append(self._last)
            written.append(int(self._last.argmax()))
            self._forward(written[-1:], keep=1)
        return Decoded(tuple(written), torch.stack(logits))

    def reselect(self) -> Moves:
        """Fill the pool anew, by what the last token's queries say when the policy looks at them."""
        self._touched = True
        return self._reselect()

    def keys(self) -> Tensor:
        """K of all tokens, evicted ones included, in logical order [layers, kv_heads, tokens, head_dim] on the CPU."""
        pager, layers = self.pager, range(self.pager.geometry.layers)
        parts = [pager.payload(chunk)[:, K] for chunk in range(pager.sealed)]
        if rows := len(self.tokens) - pager.sealed * pager.geometry.chunk_tokens:  # of the chunk that is filling
            parts.append(torch.stack([pager.gather(layer).k[:, -rows:] for layer in layers]).cpu())
        return torch.cat(parts, dim=2)

    def fork(self) -> Forwards:
        """A run that goes its own way from here, over a copy of the pager."""
        twin = copy.copy(self)
        twin._touched = self.by_hand
        twin._queries = None if self._queries is None else self._queries.fork()
        twin._hold(copy.deepcopy(self.pager), self._cache.order)
        twin.tokens = list(self.tokens)
        return twin

    # Inside

    def _hold(self, pager: Pager, order: str) -> None:
        self.pager, self._cache, self._left = pager, PagedCache(pager, order), _state(pager)

    @property
    def _scorer(self) -> Scorer | None:
        return getattr(self.pager.policy, "scorer", None)

    def _refuse_broken(self) -> None:
        if self.pager.length != len(self.tokens):
            raise PagerError(
                "a forward of this run has failed midway, and it cannot go on; begin another", code="pager.broken-run"
            )

    def _parts(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """What each forward takes: what is missing of a chunk, then a chunk at a time."""
        tokens, size = list(tokens), self.pager.geometry.chunk_tokens
        self.check(tokens)
        first = -len(self.tokens) % size
        starts = [*([0] if first else []), *range(first, len(tokens), size)]
        return (tokens[at : first if at < first else at + size] for at in starts)

    def _forward(self, tokens: list[int], keep: int) -> Tensor:
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        self._touched = self.by_hand
        self.pager.alloc_span(start, len(tokens))
        columns = self.pager.columns(self._cache.order)
        logits = self.model.forward(tokens, self._cache, columns, start, keep, self._queries)
        self.tokens += tokens
        self._last = logits[-1]
        self._note(start, end, columns.numel())
        self._seal()
        if self._queries is not None and end // self.every > start // self.every:
            self._reselect()
        self._left = _state(self.pager)
        return logits

    def _note(self, start: int, end: int, rows: int) -> None:
        """How far this run is the cold one, and how far it has read everything."""
        if start == self._complete and rows == end:
            self._complete = end
        whole = start == self._exact and end - start == self.pager.geometry.chunk_tokens
        if whole and (self._complete == end or not self._touched):
            self._exact = end

    def _seal(self) -> None:
        """What is kept of chunks that are full now."""
        known = len(self.chain)
        if self.pager.sealed == known:
            return
        self.chain = links(self.tokens, self.pager.geometry.chunk_tokens, self.salt)
        if (scorer := self._scorer) is not None:
            for chunk in range(known, len(self.chain)):
                scorer.add(self.chain[chunk], self.pager.payload(chunk))

    def _reselect(self) -> Moves:
        if self._queries is not None and self._last is not None:
            scores = self.policy.scores(self._seen())
            if scores is not None:
                self.pager.set_scores(scores)
                self._scored_at = len(self.tokens)
        return self.pager.reselect()

    def _seen(self) -> AttentionSeen:
        """What the last token shows of the sealed chunks."""
        queries, mass = self._queries.at(len(self.tokens) - 1), None
        if "mass" in self.policy.needs:
            size = self.pager.geometry.chunk_tokens
            mass = attention_mass(queries, self.keys(), size, self.model.scaling)[: self.pager.sealed].tolist()
        return AttentionSeen(queries, self.chain, mass)


def _state(pager: Pager) -> tuple:
    """What changes whenever a chunk of a pager is moved, asked for or scored."""
    return pager.epoch, pager.chunks.clock, tuple(chunk.score for chunk in pager.chunks.items)


# What transformers takes for its cache, and what is a pager.


class PagedCache(Cache):
    """K and V of one sequence, in a pager.

    It has no layers of its own, so that nothing but the pager knows how long the context is: whoever runs a forward
    with it gives positions and mask.

    Parameters
    ----------
    pager : Pager
        Has places for the tokens of the forward.
    order : {"logical", "slot"}
        See `Pager.gather`.
    """

    def __init__(self, pager: Pager, order: str = "logical"):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.pager, self.order = pager, order

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args, **_kwargs
    ) -> tuple[Tensor, Tensor]:
        """A layer's new rows into the pager, and the rows that attention reads out of it.

        Parameters
        ----------
        key_states, value_states : Tensor
            [1, kv_heads, n, head_dim], K after the rotary embedding.
        layer_idx : int

        Returns
        -------
        tuple of Tensor
            K and V [1, kv_heads, rows, head_dim].

        Raises
        ------
        CapabilityError
            For more than one sequence.
        """
        batch, _, n, _ = key_states.shape
        if batch != 1:
            raise CapabilityError(f"a paged cache holds one sequence; the forward has {batch}", code="capability.batch")
        self.pager.write(layer_idx, self.pager.length - n, key_states[0], value_states[0])
        rows = self.pager.gather(layer_idx, self.order)
        return rows.k[None], rows.v[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that have a place."""
        return self.pager.length

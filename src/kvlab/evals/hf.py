"""Answers from a transformers model, every one of them read through a cache.

A request takes two steps, scored or written. The context but for its last token goes through in one call and is stored
as the codec stores it. From the last token on the model reads what was stored: the first predicted token hangs on the
coded context like every later one. In a single call over the whole context, the usual way, the prediction after it
would come from K and V as they were computed, and of a question with one-letter answers nothing else is scored.

This is the protocol `snapshot`; what is written is stored by the codec in its turn.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from kvlab.cache.hf.expected_fires import counts
from kvlab.cache.hf.kv_cache import Calibration, KVCache
from kvlab.core.errors import CapabilityError
from kvlab.core.recipe import Recipe
from kvlab.engines.hf.engine import HFEngine
from kvlab.evals.backend import CacheUse, Kind, ScoreRequest, ScoreResult, Side, Sides, WriteRequest, WriteResult
from kvlab.evals.canary import ONE_BIT

PROTOCOL = "snapshot"


@dataclass
class Passage:
    """A cache, how many tokens each call to it had, and the log-probabilities after the last call [tokens, words]."""

    cache: Cache
    calls: list[int] = field(default_factory=list)
    logprobs: torch.Tensor | None = None

    def fork(self) -> Passage:
        """The same past, to be continued in another way."""
        return Passage(copy.deepcopy(self.cache), list(self.calls))


class HFSide(Side):
    """The model with transformers' own cache; one request at a time.

    Parameters
    ----------
    engine : HFEngine
    tokenizer : transformers.PreTrainedTokenizerBase
    ends : frozenset of int
        Tokens that end a text.
    """

    what = "no codec"

    def __init__(self, engine: HFEngine, tokenizer, ends: frozenset[int]):
        self._engine, self._tokenizer, self._ends = engine, tokenizer, ends
        self.kv_cache_dtype, self.cache_class = engine.dtype, type(self._empty()).__name__
        self._last: tuple[list[int], Passage] | None = None  # questions with several answers share their context
        self.begin()

    def _empty(self) -> Cache:
        return DynamicCache(config=self._engine.model.config)

    def begin(self) -> None:
        """See `Side.begin`."""
        self._counts = [0, 0, 0, 0]

    def seen(self) -> CacheUse:
        """See `Side.seen`."""
        return CacheUse(*self._counts)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """See `Side.score`."""
        return [self._scored(request) for request in self._shown(requests, "score")]

    @torch.inference_mode()
    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """See `Side.write`."""
        return [self._written(request) for request in self._shown(requests, "write")]

    def _shown(self, requests: Sequence, kind: Kind) -> Iterable:
        """The requests, with a bar for more than one."""
        return tqdm(requests, desc=f"{self.what}: {kind}", leave=False, disable=len(requests) < 2)

    def _scored(self, request: ScoreRequest) -> ScoreResult:
        passage = self._pass_context(request.context)
        self._feed(passage, [request.context[-1], *request.continuation[:-1]])
        said = torch.tensor(request.continuation, device=passage.logprobs.device)
        self._account(passage)
        chosen = passage.logprobs.gather(1, said[:, None])[:, 0]
        return ScoreResult(chosen.tolist(), bool((passage.logprobs.argmax(-1) == said).all()))

    def _written(self, request: WriteRequest) -> WriteResult:
        passage, token, ids, logprobs = self._pass_context(request.context), request.context[-1], [], []
        while len(ids) < request.tokens:
            self._feed(passage, [token])
            token = int(passage.logprobs[-1].argmax())
            ids.append(token)
            logprobs.append(float(passage.logprobs[-1, token]))
            if token in self._ends or any(stop in self._text(ids) for stop in request.stops):
                break
        self._account(passage)
        return WriteResult(self._text(ids), logprobs)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _pass_context(self, context: list[int]) -> Passage:
        """The cache with all of a context but its last token in it."""
        if len(context) < 2:
            raise CapabilityError(
                "a request has a context of one token, so its answer reads nothing from a coded cache; leave tasks out"
                " that score answers without their question (such as acc_mutual_info)",
                code="capability.reads-nothing",
            )
        if self._last is None or self._last[0] != context:
            passage = Passage(self._empty())
            self._feed(passage, context[:-1])
            self._last = (context, passage)
        return self._last[1].fork()

    def _feed(self, passage: Passage, ids: list[int]) -> None:
        """One call of the model over what is cached; predictions after each of its tokens are kept."""
        model = self._engine.model
        tokens = torch.tensor([ids], device=model.device)
        kept = 1 if not passage.calls else len(ids)  # after the context's first part nothing is asked
        output = model(tokens, past_key_values=passage.cache, use_cache=True, logits_to_keep=kept)
        passage.calls.append(len(ids))
        passage.logprobs = output.logits[0].float().log_softmax(-1)

    def _account(self, passage: Passage) -> None:
        """Count what a request's cache holds and did."""
        values = sum(passage.calls) * self._engine.info.values_per_token
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in passage.cache.layers)
        self._count(0, 0, held, values)

    def _count(self, *news: int) -> None:
        self._counts = [old + new for old, new in zip(self._counts, news, strict=True)]


class CodedHFSide(HFSide):
    """The model with a cache that holds K and V as a recipe's codecs store them.

    Parameters
    ----------
    recipe : Recipe
    calibration : Calibration or None
        As `KVCache` takes them.
    """

    def __init__(
        self,
        engine: HFEngine,
        tokenizer,
        ends: frozenset[int],
        recipe: Recipe,
        calibration: Calibration | None = None,
    ):
        # decoded once and kept: what attention reads is the same, and a written token costs one token's decoding
        self._model_cache = KVCache(engine.model, recipe, calibration, "serving", window_bytes=None, compiled=False)
        self.what = " and ".join(sorted({recipe.k.codec, recipe.v.codec}))
        super().__init__(engine, tokenizer, ends)

    def _empty(self) -> Cache:
        return copy.deepcopy(self._model_cache)  # shares the codecs' tables

    def _account(self, passage: Passage) -> None:
        """Count what the codecs did; `CodecNotActive` where it is not what the calls that were made ask for."""
        self._count(*counts(passage.cache, passage.calls))


def sides(engine: HFEngine, tokenizer, ends: frozenset[int], recipe: Recipe, calibration: Calibration | None) -> Sides:
    """The model as it is, under a recipe, and under the canaries."""
    variant = CodedHFSide(engine, tokenizer, ends, recipe, calibration)
    one_bit = {name: CodedHFSide(engine, tokenizer, ends, canary) for name, canary in ONE_BIT.items()}
    return Sides(HFSide(engine, tokenizer, ends), variant, one_bit)

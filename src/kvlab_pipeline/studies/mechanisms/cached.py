"""`kvlab.Cache` on the windows of one eval, filled and read as `generate` does.

The context goes through in one call and is stored by the codec; it sees its own tokens as they are, so that one forward
of it serves every recipe. What follows comes token after token, each of which reads what was stored before it and is
stored in its turn; of a needle the question is one call, as a prompt is. The same calls with transformers' own cache
are what this is held against. So every scored token reads mostly coded K and V: in one pass over many tokens it would
read those of its neighbours as they were computed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache

from kvlab.cache.hf.expected_fires import counts
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.codecs.int import IntStream
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CodecNotActive, Fault
from kvlab.core.recipe import IDENTITY, Recipe
from kvlab.core.records import CANARY_MIN, TWO_PASSES
from kvlab.engines.base import ContextCache, Storage
from kvlab.engines.hf.engine import HFEngine
from kvlab.measure.engines import Visit
from kvlab.measure.store import Found
from kvlab.measure.variant import computed_again
from kvlab.measure.windows import Window
from kvlab.stats.divergences import ReferenceLogits
from kvlab_pipeline.jobs.measure import calibrated_for
from kvlab_pipeline.studies.mechanisms.items import SCORERS, fidelity
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY
from kvlab_pipeline.studies.mechanisms.subjects import EvalSubject

# what a run keeps for all rows: the same calls with transformers' own cache, and what one bit does in ours
PLAIN, ONE_BIT_KL = "plain calls", "one bit in the Cache"
ONE_BIT = (Recipe(k=IntStream(bits=1), v=IdentityStream()), Recipe(k=IdentityStream(), v=IntStream(bits=1)))


class NextTokens(NamedTuple):
    """The tokens that follow a stored context, cut into calls, and the labels that the last of them predict."""

    calls: tuple[tuple[int, ...], ...]
    labels: torch.Tensor


class RecordingCache(DynamicCache):
    """transformers' own cache, and what it was given: layers with a window let go of a part."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """See `Cache.update`."""
        self.given.append((key_states, value_states))
        return super().update(key_states, value_states, *args, **kwargs)


class PlainCalls(NamedTuple):
    """What transformers' own cache comes to: the context's K after its rotary embedding, and V, and later logits."""

    context: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


def request_of(window: Window, tokens: int) -> NextTokens:
    """The request that a window is: at most `tokens` scored ones, the first of which ends what is given at once."""
    given = window.context + window.first + 1
    scored = window.ids[given : given + tokens]
    calls = (window.ids[window.context : given], *((token,) for token in scored[:-1]))
    return NextTokens(calls, torch.tensor(scored))


@dataclass(eq=False)
class Cached(EvalSubject):
    """One recipe in the Cache on the windows of one eval.

    Parameters
    ----------
    tokens : int
        Scored of each window at most.
    """

    tokens: int = 16
    _cache: KVCache | None = None

    def identity(self) -> dict | None:
        """See `EvalSubject.identity`."""
        known = super().identity()
        return known and known | {"tokens": self.tokens}

    def score(self, visit: Visit) -> Found:
        """See `EvalSubject.score`.

        Raises
        ------
        CodecNotActive
            A layer was not coded when it should have been, or nothing hangs on what the cache holds.
        Fault
            The Cache moves the logits where it stores everything as it is.
        WitnessDisagrees
            A forward that is written out comes to other logits over what the Cache holds.
        """
        run, engine, judge = visit.run(self.plain), visit.engines.get(self.plain), SCORERS[self.quality_eval_id]
        request = request_of(visit.window, self.tokens)
        if PLAIN not in run.kept:
            run.kept[PLAIN] = _plain(engine, visit.window, request)
        plain = run.kept[PLAIN]
        reference = ReferenceLogits(plain.logits, request.labels.to(plain.logits.device))
        note, text = {}, self.quality_eval_id == FIDELITY
        if text and self._canary is None:
            if ONE_BIT_KL not in run.kept:
                run.kept[ONE_BIT_KL] = _probed(engine, visit.window, request, plain, reference)
            self._canary = run.kept[ONE_BIT_KL]
        cache = self._empty(engine)
        cache.fill(plain.context)
        rows = logits(engine, cache, request)
        if text:
            note = {"canary": self._canary}
            if visit.window.number == len(self.lab.windows.test) - 1:
                contents = _contents(cache, cache.get_seq_length() - 1), rows[-1:]
                note["witnessed"] = computed_again(
                    self.lab.plain(), run, *contents, None, self.planned.label, rotated=True
                )
        found = counts(cache, [visit.window.context, *map(len, request.calls)])
        storage = Storage(engine.dtype, type(cache).__name__, engine.storage.itemsize)
        note |= {"variant": judge(reference, rows), "baseline": judge(reference, reference.logits)}
        return Found(note | found._asdict() | {"storage": asdict(storage)})

    def _empty(self, engine: HFEngine) -> KVCache:
        """The Cache without tokens. It may hold all of itself decoded, which changes only how long a step takes."""
        if self._cache is None:
            cell = self.planned.cell
            calibrated = calibrated_for(cell, self.lab.calibrated)
            self._cache = KVCache(engine.model, cell.recipe, calibrated, window_bytes=None, compiled=False)
        self._cache.reset()
        return self._cache


def _probed(
    engine: HFEngine, window: Window, request: NextTokens, plain: PlainCalls, reference: ReferenceLogits
) -> float:
    """KL of one bit for K or V, whichever is less, nats per token; first the Cache must add nothing of its own.

    That holds where it is filled as the rows' caches are, and where a forward of its own fills it, as people do.
    """

    def moved(recipe: Recipe, forward: bool = False) -> float:
        cache = KVCache(engine.model, recipe, window_bytes=None, compiled=False)
        if forward:
            called(engine, cache, window.ids[: window.context])
        else:
            cache.fill(plain.context)
        return fidelity(reference, logits(engine, cache, request))["kl"]

    if not (own := max(moved(IDENTITY), moved(IDENTITY, forward=True))) <= TWO_PASSES[engine.dtype]:
        raise Fault(
            f"the Cache moves the logits by KL {own:.1e} nats per token where it stores all as it is; allowed in"
            f" {engine.dtype}: {TWO_PASSES[engine.dtype]:.0e}",
            code="fault.floor",
        )
    if (least := min(map(moved, ONE_BIT))) < CANARY_MIN:
        raise CodecNotActive(
            f"one bit in the Cache moves the logits by KL {least:.1e} nats only: attention does not read what it holds",
            code="not-active.canary",
        )
    return least


def _plain(engine: HFEngine, window: Window, request: NextTokens) -> PlainCalls:
    """The calls with transformers' own cache."""
    cache = RecordingCache(config=engine.model.config)
    called(engine, cache, window.ids[: window.context])
    return PlainCalls(cache.given.copy(), logits(engine, cache, request))


def logits(engine: HFEngine, cache: Cache, request: NextTokens) -> torch.Tensor:
    """Logits [labels, vocabulary] after each call that follows the context."""
    return torch.cat([called(engine, cache, ids) for ids in request.calls])


@torch.inference_mode()
def called(engine: HFEngine, cache: Cache, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits [1, vocabulary] after a call."""
    tokens = torch.tensor([ids], device=engine.model.device)
    return engine.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]


def _contents(cache: KVCache, tokens: int) -> ContextCache:
    """K after its rotary embedding, and V, of the first tokens, as the last call read them."""
    decoded = ((number, cache.decoded(number)) for number in range(len(cache.layers)))
    return {(number, part): x[0, :, :tokens] for number, pair in decoded for part, x in zip("kv", pair, strict=True)}

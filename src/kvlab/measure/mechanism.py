"""Attention that reads less, latent caches and evictions, in the measuring loop beside codecs.

What is measured here is held against the same untouched passes as a codec. `kvlab measure` and the study of tradeoffs
put it over K and V that are rounded to bfloat16, so its bytes are those of 16 bits; a row for the gate has K and V as
its engine stores them.

On every window each layer has to have run once, and something has to have been left out. A witness computes the last
window of a snapshot again, over the K and V that were read; reading by a pattern is written out there a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from kvlab.attention.hf import Effect, attending, plan_of
from kvlab.attention.latent_svd import LatentMoments
from kvlab.attention.layer_plan import LayerPlan
from kvlab.attention.named import ByLength, Eviction, Latent, Mechanism, Sparse
from kvlab.attention.patterns import Full, SlidingWindow
from kvlab.calibration.load import Calibrated
from kvlab.codecs.cast import CastStream
from kvlab.core.errors import CalibrationMismatch, CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import ENGINES, IDENTITY, Cell, Recipe, StreamRecipe
from kvlab.engines.base import ContextCache, Engine, gone_from
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import Coder, Tally, now
from kvlab.measure.eviction import EvictingCoder, KeepingCoder
from kvlab.measure.latent import LatentCoder, fitted
from kvlab.measure.scoring import WindowRun, cell_of_all_layers
from kvlab.measure.variant import ITEMSIZE, Variant, VariantOutcome, read_of
from kvlab.witness.reading import reader, reader_of_kept

IN_16_BITS = Recipe(k=CastStream(), v=CastStream())

Keeping = Latent | Eviction
"""What keeps less of a finished context, and reads all that it keeps."""


def not_run(asked: Mechanism, engine: str, protocol: str, info: ModelInfo) -> str | None:
    """Why a mechanism cannot be measured so; None where it can."""
    if not isinstance(asked, Latent) and any(info.windows):
        return "it chooses among all tokens, and layers of this model see a window of them alone"
    if isinstance(asked, Keeping) and protocol != "snapshot":
        return "it keeps less of a finished context, and a forward makes K and V one after the other"
    paged = ENGINES[engine].paged
    if isinstance(asked, Eviction) and paged:
        return f"{engine} computes a prompt in pages of its own, which keep every token"
    if paged and not isinstance(asked, Latent):
        return f"{engine}'s attention reads its own pages with its own kernel, to which no pattern can be given"
    return None


def refuse_needless(asked: Mechanism, engine: str, protocol: str, info: ModelInfo, context: int) -> None:
    """`CapabilityError` where it cannot be measured so, or would leave out nothing of contexts of so many tokens."""
    if why := not_run(asked, engine, protocol, info):
        raise CapabilityError(why, code="capability.not-run")
    whole = 2 * info.n_kv_heads * info.head_dim
    if isinstance(asked, Latent):
        if asked.rank >= whole:
            raise CapabilityError(f"a token's K and V of a layer are {whole} numbers, no more than its latent has")
    elif asked.budget(context) == context if isinstance(asked, Eviction) else asked.pattern.keys(context) > context:
        raise CapabilityError(f"it leaves out nothing of {context} tokens, the windows' context")


def extremes(asked: Keeping, info: ModelInfo, context: int) -> tuple[Keeping, Keeping]:
    """The same, keeping everything and keeping next to nothing."""
    if isinstance(asked, Latent):
        return replace(asked, rank=2 * info.n_kv_heads * info.head_dim), replace(asked, rank=1)
    return replace(asked, kept=context), replace(asked, kept=1)


@dataclass(eq=False)
class ReducedCache(Variant):
    """A latent cache or an eviction: a context's cache with less in it, all of which is read.

    Parameters
    ----------
    cell : Cell
        Where it is at work; see `KeepingCoder`.
    engine, moments : callable
        Give the engine, and what latents are fitted to (`latent.moments_of`), when the first cache comes.
    dtype, stream
        See `LatentCoder`; an eviction has no codec.
    """

    asked: Keeping
    cell: Cell
    engine: Callable[[], Engine]
    moments: Callable[[], Mapping[int, LatentMoments]]
    dtype: torch.dtype | None
    stream: StreamRecipe | None = None

    def __post_init__(self):
        self.name = self.asked.name
        if isinstance(self.asked, Latent):
            maps = cache(lambda: fitted(self.moments(), self.asked.rank))
            self.coder = LatentCoder(self.cell, maps, self.asked.sinks, self.dtype, self.stream)
        else:
            self.coder = EvictingCoder(self.cell, self.asked, lambda n: self.engine().rotation(n, 0), self.dtype)

    def measure(self, run: WindowRun) -> VariantOutcome:
        """See `Variant`."""
        logits, held = over_kept(run, self.coder)
        tally = self.coder.tally
        stored = tally.coded_bytes / run.context
        note = {"stored": stored, "read": read_of(stored, run.context, len(run.ids), run.engine.info)}
        note |= {"tally": tally.to_json(), "pattern": self.asked.told}
        attend = reader_of_kept([one.tolist() for one in held.places], held.context) if gone_from(held) else None
        return VariantOutcome(logits, run.over_clean, note, self.coder.made, attend)

    def probes(self, run: WindowRun) -> Iterator[VariantOutcome]:
        """See `Variant`; their numbers are kept as they are computed."""
        for extreme in extremes(self.asked, run.engine.info, run.context):
            yield replace(self, asked=extreme, dtype=None, stream=None).measure(run)


@dataclass(eq=False)
class SparseReading(Variant):
    """A pattern in every layer's attention: K and V are all stored, and less of them is read.

    Parameters
    ----------
    cell : Cell or None
        What is done to the K and V that are read, and when. None: they are those of the pass itself, as its engine
        stores them.
    calibrated : Calibrated or None
        What that cell's codec reads.
    """

    asked: Sparse | ByLength
    cell: Cell | None = None
    calibrated: Calibrated | None = None

    def __post_init__(self):
        self.name = self.asked.name

    def measure(self, run: WindowRun) -> VariantOutcome:
        """See `Variant`."""
        plan = self.asked.plan(run.engine.info.n_layers, run.context)
        coder = coder_of(self.cell, self.calibrated) if self.cell else None
        outcome, effect = self._read(run, plan, coder)
        effect.refuse_idle(plan)
        return replace(outcome, note=outcome.note | self._bytes(run, plan, effect, coder))

    def probes(self, run: WindowRun) -> Iterator[VariantOutcome]:
        """See `Variant`; over K and V as they are."""
        cell = self.cell and self.cell.model_copy(update={"recipe": IDENTITY})
        for pattern in (Full(), SlidingWindow(1)):
            yield self._read(run, (pattern,) * run.engine.info.n_layers, coder_of(cell, None) if cell else None)[0]

    def _read(self, run: WindowRun, plan: LayerPlan, coder: Coder | None) -> tuple[VariantOutcome, Effect]:
        """A window under a plan, and what that did."""
        engine, cell = run.engine, coder and coder.cell
        reference = run.reference_of(cell) if cell else run.reference  # made before attention is another
        held = run.snapshot(cell, coder) if cell and cell.protocol == "snapshot" else None
        with attending(engine.model, plan) as effect:
            effect.context = run.context if cell else 0
            began = now(reference)
            if held is not None:
                logits = engine.score_over(run.ids, held)
            elif cell:
                logits = run.logits(cell, coder)
            else:
                logits = engine.score(run.ids, run.context)
            took = now(logits) - began
            ran = sorted({pattern.name for pattern in plan_of(engine.model) or ()})
        note = {"seconds": took, "pattern": " and ".join(ran)}
        return VariantOutcome(logits, reference, note, held, reader(plan)), effect

    def _bytes(self, run: WindowRun, plan: LayerPlan, effect: Effect, coder: Coder | None) -> dict[str, float]:
        """Of a token that is stored and of all that one reads: the context's K and V as they are coded, the rest not.

        `read_early` counts the context alone, and nothing where nothing is coded.
        """
        info, scored = run.engine.info, len(run.ids) - run.context
        itemsize = ITEMSIZE if coder else run.engine.storage.itemsize
        coded = itemsize * info.values_per_token
        if coder and self.cell.recipe != IN_16_BITS:
            found = coder.coding(info, run.context, self.cell.dtype)
            coded = (found.coded_bytes + found.raw_bytes) / run.context
        early, vector = effect.read_early(scored), info.head_dim * itemsize
        read = (effect.read(scored) - early) * vector + early * (coded * info.head_dim / info.values_per_token)
        return {"stored": coded + itemsize * numbers_beside(plan, info), "read": read}


def numbers_beside(plan: LayerPlan, info: ModelInfo) -> float:
    """Numbers that a plan stores of each token beside K and V, to choose by or to read in their place."""
    return sum(pattern.indexed for pattern in plan) * info.n_kv_heads * info.head_dim


def mechanism_variant(
    asked: Mechanism,
    engine: Engine,
    protocol: str,
    moments: Mapping[int, LatentMoments] | None = None,
    recipe: Recipe = IN_16_BITS,
    calibrated: Calibrated | None = None,
) -> Variant:
    """A mechanism on a running engine.

    Parameters
    ----------
    moments : mapping of int to LatentMoments, by layer, optional
        That a latent cache is fitted to; see `latent.moments_of`.
    recipe : Recipe
        Of the K and V that a pattern reads; of its K stream, that of latents. `IN_16_BITS`: no codec.
    calibrated : Calibrated or None
        What a pattern's recipe reads.

    Raises
    ------
    CapabilityError
        It cannot be measured there.
    CalibrationMismatch
        A latent cache lacks the moments of a layer.
    """
    if why := not_run(asked, engine.name, protocol, engine.info):
        raise CapabilityError(
            f"{asked.name} is not measured on {engine.name}, {protocol}: {why}", code="capability.not-run"
        )
    if not isinstance(asked, Keeping):
        return SparseReading(asked, cell_of_all_layers(asked.name, engine, protocol, recipe), calibrated)
    if isinstance(asked, Latent) and len(moments or ()) != engine.info.n_layers:
        raise CalibrationMismatch(f"{asked.name} needs moments of all {engine.info.n_layers} layers")
    cell = cell_of_all_layers(asked.name, engine, protocol, IDENTITY)
    stream = None if recipe == IN_16_BITS else recipe.k
    return ReducedCache(asked, cell, lambda: engine, lambda: moments, torch.bfloat16, stream)


def over_kept(run: WindowRun, coder: KeepingCoder) -> tuple[torch.Tensor, ContextCache]:
    """Logits of the tokens after a context over what a coder keeps of it, and that; the tally is of this alone.

    Raises
    ------
    CodecNotActive
        The coder did not keep something of each layer and stream.
    """
    coder.tally = Tally()
    held = run.snapshot(coder.cell, coder)
    coder.refuse_idle()
    return run.engine.score_over(run.ids, held), held

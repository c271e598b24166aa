"""Attention that reads less, latent caches and evictions, in the measuring loop beside codecs.

Not to be confused with the study `mechanisms`, whose rows are codecs for the gate. What is measured here is held
against the same untouched passes as a codec, over K and V rounded to bfloat16: its bytes are those of 16 bits.

Each has to prove on the first window that it is at work, as a codec's tap does: what keeps everything has to leave the
logits alone, and what keeps next to nothing has to move them. On every window each layer has to have run once, and
something has to have been left out. A witness computes the last window of a snapshot again, over the K and
V that were read; reading by a pattern is written out there a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import polars as pl
import torch

from kvlab.attention.hf import Effect, attending
from kvlab.attention.latent_svd import LatentMoments
from kvlab.attention.layer_plan import LayerPlan
from kvlab.attention.named import Eviction, Latent, Mechanism
from kvlab.attention.patterns import Full, SlidingWindow
from kvlab.calibration.load import Calibrated
from kvlab.codecs.cast import CastStream
from kvlab.core.errors import CalibrationMismatch, CapabilityError, CodecNotActive, Fault, WitnessDisagrees
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Cell, Recipe, StreamRecipe
from kvlab.core.records import CANARY_MIN, SAME
from kvlab.core.settings import IdentityStream
from kvlab.engines.base import ContextCache, Engine, context_of, gone_from
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import Coder, Tally
from kvlab.measure.eviction import EvictingCoder, KeepingCoder
from kvlab.measure.latent import LatentCoder, fitted
from kvlab.measure.scoring import WindowRun
from kvlab.witness.plain import PlainModel
from kvlab.witness.reading import Attend, reader, reader_of_kept
from kvlab.witness.scores import divergence, log_softmax
from kvlab.witness.testify import TENSORS

ITEMSIZE = 2  # bytes of a number that no codec codes
IN_16_BITS = Recipe(k=CastStream(), v=CastStream())
AS_IT_IS = Recipe(k=IdentityStream(), v=IdentityStream())


Keeping = Latent | Eviction
"""What keeps less of a finished context, and reads all that it keeps."""


def not_run(asked: Mechanism, engine: str, protocol: str) -> str | None:
    """Why a mechanism cannot be measured so; None where it can."""
    if isinstance(asked, Keeping) and protocol != "snapshot":
        return "it keeps less of a finished context, and a forward makes K and V one after the other"
    if isinstance(asked, Eviction) and engine != "hf":
        return f"{engine} computes a prompt in pages of its own, which keep every token"
    if engine != "hf" and not isinstance(asked, Latent):
        return f"{engine}'s attention reads its own pages with its own kernel, to which no pattern can be given"
    return None


def refuse_needless(asked: Mechanism, engine: str, protocol: str, info: ModelInfo, context: int) -> None:
    """`CapabilityError` where it cannot be measured so, or would leave out nothing of contexts of so many tokens."""
    if why := not_run(asked, engine, protocol):
        raise CapabilityError(why, code="capability.not-run")
    whole = 2 * info.n_kv_heads * info.head_dim
    if isinstance(asked, Latent):
        if asked.rank >= whole:
            raise CapabilityError(f"a token's K and V of a layer are {whole} numbers, no more than its latent has")
    elif asked.budget(context) == context if isinstance(asked, Eviction) else asked.pattern.keys(context) > context:
        raise CapabilityError(f"it leaves out nothing of {context} tokens, the windows' context")


def keeping_coder(
    asked: Keeping,
    cell: Cell,
    engine: Callable[[], Engine],
    moments: Callable[[], Mapping[int, LatentMoments]],
    dtype: torch.dtype | None,
    stream: StreamRecipe | None = None,
) -> KeepingCoder:
    """What keeps less of a context, as a coder; engine and moments are asked for when the first cache comes.

    Parameters
    ----------
    moments : callable
        See `latent.moments_of`; evictions ask for none.
    dtype, stream
        See `LatentCoder`.
    """
    if isinstance(asked, Latent):
        return LatentCoder(cell, cache(lambda: fitted(moments(), asked.rank)), asked.sinks, dtype, stream)
    return EvictingCoder(cell, asked, lambda tokens: engine().rotation(tokens), dtype)


def extremes(asked: Keeping, info: ModelInfo, context: int) -> tuple[Keeping, Keeping]:
    """The same, keeping everything and keeping next to nothing."""
    if isinstance(asked, Latent):
        return replace(asked, rank=2 * info.n_kv_heads * info.head_dim), replace(asked, rank=1)
    return replace(asked, kept=context), replace(asked, kept=1)


def refuse_unheard(name: str, floor: float, canary: float, dtype: str) -> None:
    """`Fault` where keeping, or reading, everything moves the logits; `CodecNotActive` where next to nothing does not.

    Parameters
    ----------
    floor, canary : float
        Mean KL of everything and of next to nothing, nats per token.
    """
    if not floor <= SAME[dtype]:
        raise Fault(
            f"{name}: what keeps and reads everything moves the logits by KL {floor:.1e} nats per token",
            code="fault.floor",
        )
    if not canary >= CANARY_MIN:
        raise CodecNotActive(
            f"{name}: next to nothing in its place moves the logits by KL {canary:.1e} nats only: either it does not"
            " reach the attention, or the predictions do not hang on the context",
            code="not-active.canary",
        )


@dataclass(eq=False)
class Applied:
    """A mechanism on every window, as the measuring loop scores it (`loop.Subject`).

    Parameters
    ----------
    asked : Mechanism
    moments : mapping of int to LatentMoments, by layer
        That a latent cache is fitted to; see `latent.moments_of`.
    plain : callable or None
        Gives the witness's model; None for no witness.
    last : int
        The window that is computed again.
    recipe : Recipe
        Of the K and V that a pattern reads; of its K stream, that of latents. `IN_16_BITS`: no codec.
    calibrated : Calibrated or None
        What that recipe reads.

    Attributes
    ----------
    witnessed : float or None
        KL from the witness's logits to those of the last window, nats per token.
    tables : list of polars.DataFrame
        Token rows of each window.
    read : list of float
        Bytes of each window that a scored token read on average.
    """

    asked: Mechanism
    engine: Engine
    protocol: str
    context: int
    moments: Mapping[int, LatentMoments] = field(default_factory=dict)
    plain: Callable[[], PlainModel] | None = None
    last: int = 0
    recipe: Recipe = IN_16_BITS
    calibrated: Calibrated | None = None
    tables: list[pl.DataFrame] = field(default_factory=list, init=False)
    read: list[float] = field(default_factory=list, init=False)
    stored: float = field(default=0.0, init=False)
    witnessed: float | None = field(default=None, init=False)

    def __post_init__(self):
        if why := not_run(self.asked, self.engine.name, self.protocol):
            raise CapabilityError(
                f"{self.asked.name} is not measured on {self.engine.name}, {self.protocol}: {why}",
                code="capability.not-run",
            )
        if isinstance(self.asked, Latent) and len(self.moments) != self.engine.info.n_layers:
            raise CalibrationMismatch(f"{self.asked.name} needs moments of all {self.engine.info.n_layers} layers")
        if isinstance(self.asked, Keeping):
            self._coder = self._keeping(
                self.asked, torch.bfloat16, None if self.recipe == IN_16_BITS else self.recipe.k
            )

    def due(self, _window: int) -> bool:
        """On every window."""
        return True

    def score(self, run: WindowRun) -> pl.DataFrame:
        """Its token rows.

        Raises
        ------
        CodecNotActive
            It does not move the logits, did not run in each layer, or left nothing out.
        Fault
            What keeps everything moves the logits.
        """
        if run.number == 0:
            self._probe(run)
        rows = self._kept(run) if isinstance(self.asked, Keeping) else self._by_plan(run, self.plan)
        self.tables.append(rows)
        return rows

    def keeps(self, run: WindowRun) -> ContextCache:
        """What it keeps of a window's context, of what keeps less."""
        return run.snapshot(self._coder.cell, self._coder)

    @property
    def plan(self) -> LayerPlan:
        """What each layer reads by."""
        return self.asked.plan(self.engine.info.n_layers, self.context)

    def _probe(self, run: WindowRun) -> None:
        """What keeps everything, and what keeps next to nothing, on the same way as the mechanism itself."""
        info = self.engine.info
        if isinstance(self.asked, Keeping):
            probes = extremes(self.asked, info, self.context)
            passed = [over_kept(run, self._keeping(probe, None))[0] for probe in probes]
            found = [run.rows("probe", logits, run.over_clean) for logits in passed]
        else:
            found = [self._by_plan(run, (probe,) * info.n_layers, AS_IT_IS) for probe in (Full(), SlidingWindow(1))]
        refuse_unheard(self.asked.name, *(float(rows["kl"].mean()) for rows in found), self.engine.dtype)

    def _by_plan(self, run: WindowRun, plan: LayerPlan, probe: Recipe | None = None) -> pl.DataFrame:
        """Rows under a plan; with the recipe of a probe nothing is counted."""
        cell = self._cell(probe or self.recipe)
        reference = run.reference_of(cell)  # made before attention is another
        coder = coder_of(cell, None if probe else self.calibrated)
        held = run.snapshot(cell, coder) if self.protocol == "snapshot" else None
        with attending(self.engine.model, plan) as effect:
            effect.context = self.context
            logits = run.logits(cell, coder) if held is None else self.engine.score_over(run.ids, held)
        if probe is None:
            effect.refuse_idle(plan)
            self._count(run, plan, effect, self._coded_bytes(coder))
            self._witness(run, logits, held, reader(plan))
        return run.rows(cell.cell_id, logits, reference)

    def _coded_bytes(self, coder: Coder) -> float:
        """Of K and V of a token of the context; what no codec codes is in 16 bits."""
        info = self.engine.info
        if self.recipe == IN_16_BITS:
            return ITEMSIZE * info.values_per_token
        found = coder.coding(info, self.context, self.engine.dtype)
        return (found.coded_bytes + found.raw_bytes) / self.context

    def _count(self, run: WindowRun, plan: LayerPlan, effect: Effect, coded: float) -> None:
        """Bytes that are stored and read: K and V of the context as they are coded, all else in 16 bits."""
        info, scored = self.engine.info, len(run.ids) - self.context
        early, vector = effect.read_early(scored), info.head_dim * ITEMSIZE
        coded_vector = coded * info.head_dim / info.values_per_token
        self.read.append((effect.read(scored) - early) * vector + early * coded_vector)
        indexed = sum(pattern.indexed for pattern in plan) * info.n_kv_heads * info.head_dim
        self.stored = coded + ITEMSIZE * indexed

    def _keeping(self, asked: Keeping, dtype: torch.dtype | None, stream: StreamRecipe | None = None) -> KeepingCoder:
        cell = self._cell(AS_IT_IS)
        return keeping_coder(asked, cell, lambda: self.engine, lambda: self.moments, dtype, stream)

    def _kept(self, run: WindowRun) -> pl.DataFrame:
        """Rows over what is kept, all of which a step reads."""
        logits, held = over_kept(run, self._coder)
        self.stored = self._coder.tally.coded_bytes / self.context
        self.read.append(read_of(self.stored, self.context, len(run.ids), self.engine.info.values_per_token))
        self._witness(run, logits, self._coder.made, attention_over(held))
        return run.rows(self._coder.cell.cell_id, logits, run.over_clean)

    def _witness(
        self, run: WindowRun, logits: torch.Tensor, held: ContextCache | None, attend: Callable | None = None
    ) -> None:
        """Have the last window of a snapshot computed again, over the K and V that were read."""
        if self.plain and run.number == self.last and held is not None:
            self.witnessed = computed_again(self.plain(), run, held, logits, attend, self.asked.name)

    def _cell(self, recipe: Recipe) -> Cell:
        return Cell(
            study="cells",
            label=self.asked.name,
            engine=self.engine.name,
            dtype=self.engine.dtype,
            protocol=self.protocol,
            origin=self.engine.name,
            stream="kv",
            layers=tuple(range(self.engine.info.n_layers)),
            windows=1,
            recipe=recipe,
        )


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


def attention_over(held: ContextCache) -> Attend | None:
    """How a witness reads what is left of a context; None where that is every token."""
    return reader_of_kept([one.tolist() for one in held.places], held.context) if gone_from(held) else None


def read_of(stored: float, context: int, tokens: int, values: int) -> float:
    """Bytes that a scored token reads on average: the stored context, and what came since, itself too, in 16 bits.

    Parameters
    ----------
    stored : float
        Bytes of a token of the context.
    tokens, values : int
        Of the window, and K and V elements of one token.
    """
    return stored * context + ITEMSIZE * values * (tokens - context + 1) / 2


# The last window of a mechanism, computed again by a forward that is written out.

AGREE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Nats per token between a mechanism and its witness: rounding, and now and then a block that is as good as another."""


def computed_again(
    model: PlainModel,
    run: WindowRun,
    held: ContextCache,
    logits: torch.Tensor,
    attend: Callable | None,
    name: str,
    rotated: bool = False,
) -> float:
    """KL from the witness's logits to those that are claimed, nats per token.

    Parameters
    ----------
    held : ContextCache
        K before its rotary embedding, and V, of the window's first tokens, as attention is said to have read them.
    logits : Tensor, shape (scored tokens, vocabulary)
        Claimed, of the tokens after them.
    attend : callable or None
        Another attention than that over everything; see `witness.reading`.
    name : str
        Of the mechanism.
    rotated : bool
        Whether K is after its rotary embedding.

    Raises
    ------
    WitnessDisagrees
        They are too far apart, or the clean cache is not that of a plain forward.
    """
    dtype, own = run.engine.dtype, model.clean(run.ids, run.context).own
    for place, x in run.clean["pre_rope"].kept.items():
        due = own[place][:, : run.context].to(x.device)
        if not float((x.float() - due).norm() / due.norm()) <= TENSORS[dtype]:
            raise WitnessDisagrees(
                f"{name}: K or V of {place} is not that of a plain forward", code="witness.other-cache"
            )
    first = context_of(held)
    passed = model.forward(run.ids[: first + 1 + len(logits)], first, held, first, rotated, attend)
    kl = float(divergence(passed.log_p, log_softmax(logits.to("cpu", torch.float64).numpy())).mean())
    if not kl <= AGREE[dtype]:
        raise WitnessDisagrees(
            f"{name}, window {run.number}: a plain forward's logits are KL {kl:.1e} nats per token away; allowed:"
            f" {AGREE[dtype]:.0e}",
            code="witness.other-logits",
        )
    return kl

"""Attention that reads less, and latent caches, in the measuring loop beside codecs.

Not to be confused with the study `mechanisms`, whose rows are codecs for the gate. What is measured here is held
against the same untouched passes as a codec, over K and V rounded to bfloat16: its bytes are those of 16 bits.

Each has to prove on the first window that it is at work, as a codec's tap does: what keeps everything has to leave the
logits alone, and what keeps next to nothing has to move them. On every window each layer has to have run once, and
something has to have been left out. A witness computes the last window of a snapshot again, over the K and
V that were read; reading by a pattern is written out there a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import polars as pl
import torch

from kvlab.attention.hf import Effect, attending
from kvlab.attention.latent_svd import LatentMap, Moments, attention_metric, fit
from kvlab.attention.layer_plan import LayerPlan
from kvlab.attention.named import Latent, Mechanism
from kvlab.attention.patterns import Full, Window
from kvlab.base.errors import CalibrationMismatch, CapabilityError, CodecNotActive, Fault
from kvlab.base.recipe import CastStream, Cell, IdentityStream, Recipe
from kvlab.base.records import CANARY_MIN, SAME
from kvlab.calibration.load import Calibrated
from kvlab.engines.base import ContextCache, Engine
from kvlab.lab.coding import Coder
from kvlab.lab.latent import LatentCoder
from kvlab.lab.mechanism_again import computed_again
from kvlab.lab.scoring import WindowRun
from kvlab.lab.whole import coder_of
from kvlab.witness.plain import PlainModel
from kvlab.witness.reading import reader

ITEMSIZE = 2  # bytes of a number that no codec codes
IN_16_BITS = Recipe(k=CastStream(), v=CastStream())
AS_IT_IS = Recipe(k=IdentityStream(), v=IdentityStream())


def not_run(asked: Mechanism, engine: str, protocol: str) -> str | None:
    """Why a mechanism cannot be measured so; None where it can."""
    if isinstance(asked, Latent):
        return "a latent is of K and V, which a forward makes one after the other" if protocol != "snapshot" else None
    if engine != "hf":
        return f"{engine}'s attention reads its own pages with its own kernel, to which no pattern can be given"
    return None


@dataclass(eq=False)
class Applied:
    """A mechanism on every window, as the measuring loop scores it (`walk.Subject`).

    Parameters
    ----------
    asked : Mechanism
    moments : mapping of int to Moments, by layer
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
    moments: Mapping[int, Moments] = field(default_factory=dict)
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
            raise CapabilityError(f"{self.asked.name} is not measured on {self.engine.name}, {self.protocol}: {why}")
        if isinstance(self.asked, Latent) and len(self.moments) != self.engine.info.n_layers:
            raise CalibrationMismatch(f"{self.asked.name} needs moments of all {self.engine.info.n_layers} layers")
        self._maps = self._fitted(self.asked.rank) if isinstance(self.asked, Latent) else {}

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
        latent = isinstance(self.asked, Latent)
        if run.number == 0:
            self._probe(run, latent)
        rows = self._through_latents(run, self._maps) if latent else self._by_plan(run, self.plan)
        self.tables.append(rows)
        return rows

    @property
    def plan(self) -> LayerPlan:
        """What each layer reads by."""
        return self.asked.plan(self.engine.info.n_layers, self.context)

    def _probe(self, run: WindowRun, latent: bool) -> None:
        """What keeps everything, and what keeps next to nothing, on the same way as the mechanism itself."""
        info = self.engine.info
        if latent:
            whole = self._through_latents(run, self._fitted(2 * info.n_kv_heads * info.head_dim), exact=True)
            least = self._through_latents(run, self._fitted(1), probe=True)
        else:
            whole = self._by_plan(run, (Full(),) * info.n_layers, AS_IT_IS)
            least = self._by_plan(run, (Window(1),) * info.n_layers, AS_IT_IS)
        floor, canary = (float(rows["kl"].mean()) for rows in (whole, least))
        if not floor <= SAME[self.engine.dtype]:
            raise Fault(f"{self.asked.name}: what keeps everything moves the logits by KL {floor:.1e} nats per token")
        if canary < CANARY_MIN:
            raise CodecNotActive(
                f"{self.asked.name}: what keeps next to nothing moves the logits by KL {canary:.1e} nats only; it does"
                " not reach the attention"
            )

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

    def _through_latents(
        self, run: WindowRun, maps: Mapping[int, LatentMap], exact: bool = False, probe: bool = False
    ) -> pl.DataFrame:
        """Rows over a cache made from latents, which `exact` leaves unrounded; of it and a probe nothing counts."""
        cell = self._cell(AS_IT_IS)
        stream = None if exact or probe or self.recipe == IN_16_BITS else self.recipe.k
        coder = LatentCoder(cell, maps, self.asked.sinks, None if exact else torch.bfloat16, stream)
        reference, logits = run.reference_of(cell), run.logits(cell, coder)
        coder.refuse_idle()
        if not (exact or probe):
            self.stored = coder.tally.coded_bytes / self.context
            self.read.append(read_of(self.stored, self.context, len(run.ids), self.engine.info.values_per_token))
            self._witness(run, logits, coder.made)
        return run.rows(cell.cell_id, logits, reference)

    def _witness(
        self, run: WindowRun, logits: torch.Tensor, held: ContextCache | None, attend: Callable | None = None
    ) -> None:
        """Have the last window of a snapshot computed again, over the K and V that were read."""
        if self.plain and run.number == self.last and held is not None:
            self.witnessed = computed_again(self.plain(), run, held, logits, attend, self.asked.name)

    def _fitted(self, rank: int) -> dict[int, LatentMap]:
        return {layer: fit(one, rank, attention_metric(one)) for layer, one in self.moments.items()}

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

"""One window, one cell: run the engine with the cell's tap and compare its logits with the reference."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl
import torch

from kvlab.codecs.block import BlockStream
from kvlab.core.errors import CodecNotActive, Fault
from kvlab.core.recipe import IDENTITY, Cell, Recipe
from kvlab.core.records import CANARY_MIN, SAME, TOKENS, TWO_PASSES
from kvlab.engines.base import ContextCache, Engine
from kvlab.measure.coding import UNDECIDING, CleanCapture, Coder, InForward, Tally
from kvlab.measure.tensor_recorder import Overheard
from kvlab.stats.divergences import ReferenceLogits

CANARY_STREAM = BlockStream(
    bits=1,
    variance_ratio=1.0,
    block_size=512,
    layout="per_head",
    n_centres=1,
    kmeans_iterations=0,
    pca="exact",
    rank_fraction=1.0,
    oversample=0,
    power_iterations=0,
    skeleton="fp32",
    share_basis=False,
    whiten=False,
    codebook="gaussian",
    seed=0,
)
CANARY = Recipe(k=CANARY_STREAM, v=CANARY_STREAM)


@dataclass
class WindowRun:
    """The clean pass of one window on one engine, from which every cell of that window starts.

    Attributes
    ----------
    reference : torch.Tensor, shape (scored tokens, vocab_size)
        Logits of the untouched model.
    clean : dict of str to CleanCapture
        The context's clean K and V by placement, which the snapshot protocol codes.

    Parameters
    ----------
    known : torch.Tensor, optional
        The reference, where an earlier visit to the window has computed it; the clean pass is then made again only for
        what asks for K and V.
    """

    engine: Engine
    ids: list[int]
    context: int
    number: int
    known: torch.Tensor | None = None
    kept: dict[str, Any] = field(init=False, default_factory=dict)  # what subjects keep while the window lasts
    _references: list[ReferenceLogits] = field(init=False, default_factory=list)
    _shared: dict[tuple, tuple[torch.Tensor, Tally]] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.reference = self._clean_pass[0] if self.known is None else self.known

    @cached_property
    def _clean_pass(self) -> tuple[torch.Tensor, list[torch.Tensor] | None, CleanCapture]:
        """Logits, what went into each layer, and K and V."""
        first = CleanCapture(self.context)
        return *self.engine.score_heard(self.ids, self.context, first), first

    @cached_property
    def clean(self) -> dict[str, CleanCapture]:
        """See the class."""
        return {"pre_rope": self._clean_pass[2]}

    @cached_property
    def _inputs(self) -> list[torch.Tensor] | None:
        return self._clean_pass[1]

    @property
    def labels(self) -> torch.Tensor:
        """The scored labels, shape (eval - 1,): `corpus.TokenWindows.labels` of this window."""
        return torch.tensor(self.ids[self.context + 1 :])

    def shared(self, cell: Cell, coder: Coder) -> torch.Tensor:
        """`logits`, which are kept while the window lasts: whoever asks for the same cell after this is given them."""
        logits = self.logits(cell, coder)
        self._shared[logits_key(cell, coder)] = logits, coder.tally
        return logits

    def logits(self, cell: Cell, coder: Coder, heard: Overheard | None = None) -> torch.Tensor:
        """Logits of the window under a cell; a cell without layers is a plain rerun, without hooks.

        Parameters
        ----------
        heard : Overheard, optional
            Filled with what passes between the tap, the coder and attention.
        """
        if not cell.layers:
            return self.rerun
        if heard is not None:
            with self.engine.reading() as heard.reading:
                return self._scored(cell, coder, heard)
        if self._shared and (known := self._shared.get(logits_key(cell, coder))):
            coder.tally = deepcopy(known[1])
            return known[0]
        return self._scored(cell, coder)

    def _scored(self, cell: Cell, coder: Coder, heard: Overheard | None = None) -> torch.Tensor:
        """A pass of the engine under a cell's protocol."""
        if cell.protocol == "snapshot":
            snapshot = self.snapshot(cell, coder)
            if heard is not None:
                heard.exchanged(self.clean_at(cell.placement).kept, snapshot, coder.places)
            return self._over(snapshot, cell)
        tokens = self.context if cell.span == "context" else len(self.ids)
        tap = InForward(coder, self.number, tokens, self.clean.get(cell.placement))
        tap = heard.around(tap) if heard is not None else tap
        if (lowest := min(cell.layers)) and self._inputs is not None:
            return self.engine.score_from(lowest, self._inputs, self.ids, self.context, tap, cell.placement)
        return self.engine.score(self.ids, self.context, tap, cell.placement)

    @cached_property
    def rerun(self) -> torch.Tensor:
        """Logits of a second pass of the untouched model."""
        return self.engine.score(self.ids, self.context)

    def _over(self, snapshot: ContextCache, cell: Cell) -> torch.Tensor:
        """Logits over a coded cache; the layers below the first coded one are not run again where that can be."""
        if cell.span != "context":
            raise Fault(f"cell {cell.label!r} codes scored tokens, which a snapshot of the context does not hold")
        inputs = self._heard[1]
        if (lowest := min(cell.layers)) and cell.placement == "pre_rope" and inputs is not None:
            return self.engine.score_over_from(lowest, inputs, self.ids, snapshot, cell.placement)
        return self.engine.score_over(self.ids, snapshot, cell.placement)

    def snapshot(self, cell: Cell, coder: Coder) -> ContextCache:
        """The context's clean cache, coded by a cell."""
        return coder.held(self.clean_at(cell.placement), self.ids[: self.context], self.number)

    def measured(self, cell: Cell, coder: Coder, name: str | None = None) -> pl.DataFrame:
        """Token rows of a cell on this window, under its id if no other name is given."""
        return self.rows(name or cell.cell_id, self.logits(cell, coder), self.reference_of(cell))

    def reference_of(self, cell: Cell) -> torch.Tensor:
        """The untouched model's logits in the passes that the cell's protocol makes.

        A snapshot is scored over a filled cache, and so is what it is held against: in bfloat16 one pass and two
        passes round differently, which is no cost of a codec.
        """
        return self.over_clean if cell.protocol == "snapshot" and cell.layers else self.reference

    @cached_property
    def over_clean(self) -> torch.Tensor:
        """Logits of the untouched model over the context's clean cache.

        Raises
        ------
        Fault
            They are not those of one pass, up to rounding: attention does not read the cache that it was given.
        """
        logits = self._heard[0]
        kl = float(self.comparable(self.reference).compare(logits)["kl"].mean())
        if not kl <= TWO_PASSES[self.engine.dtype]:
            raise Fault(
                f"{self.engine.name} in {self.engine.dtype} scores window {self.number} over its own clean cache KL"
                f" {kl:.1e} nats per token from one pass; allowed: {TWO_PASSES[self.engine.dtype]:.0e}, its rounding",
                code="fault.two-passes",
            )
        return logits

    @cached_property
    def _heard(self) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Logits over the context's clean cache, and what went into each layer."""
        return self.engine.score_over_heard(self.ids, self.clean["pre_rope"].kept)

    def clean_at(self, placement: str) -> CleanCapture:
        """The clean K and V as a tap at `placement` sees them; by another pass where the engine does not tell K."""
        if placement not in self.clean:
            self.clean[placement] = found = CleanCapture(self.context)
            found.kept = {
                (layer, part): self.engine.turned(layer, x) if part == "k" else x
                for (layer, part), x in self.clean["pre_rope"].kept.items()
            }
            if any(x is None for x in found.kept.values()):
                found.kept = {}
                self.engine.score(self.ids, self.context, found, placement)
        return self.clean[placement]

    def comparable(self, reference: torch.Tensor, first: int = 0) -> ReferenceLogits:
        """The reference's half of a comparison from row `first` on; the window's own two are computed once whole."""
        if first:
            return ReferenceLogits(reference[first:], self.labels[first:])
        known = [one for one in self._references if one.logits is reference]
        found = known[0] if known else ReferenceLogits(reference, self.labels)
        if not known and (reference is self.reference or reference is self.__dict__.get("over_clean")):
            self._references.append(found)
        return found

    def rows(self, cell_id: str, alternative: torch.Tensor, reference: torch.Tensor | None = None) -> pl.DataFrame:
        """Token rows of `alternative` against the clean pass (or another `reference`)."""
        record = self.comparable(self.reference if reference is None else reference).compare(alternative)
        n = len(self.labels)
        columns = {name: values.cpu().numpy() for name, values in record.items()}
        columns |= {"cell_id": [cell_id] * n, "window": [self.number] * n}
        columns["position"] = list(range(self.context + 1, self.context + 1 + n))
        return pl.DataFrame(columns).select(pl.col(name).cast(dtype) for name, dtype in TOKENS.items())


def logits_key(cell: Cell, coder: Coder) -> tuple:
    """What decides the logits and the tally of a cell on a window."""
    return cell.model_dump_json(exclude=UNDECIDING), type(coder), coder.calibrated is not None, coder.judged


def cell_of_all_layers(label: str, engine: Engine, protocol: str, recipe: Recipe, **other) -> Cell:
    """A recipe on K and V of all layers of a running engine, on one window; `other` are further fields of `Cell`."""
    where = {"engine": engine.name, "dtype": engine.dtype, "origin": engine.name, "protocol": protocol}
    what = {"stream": "kv", "layers": tuple(range(engine.info.n_layers)), "windows": 1, "recipe": recipe}
    return Cell(study="cells", label=label, **where | what | other)


def probe_kl(run: WindowRun, protocol: str, placement: str, stream: str, recipe: Recipe) -> float:
    """Mean KL of a codec on every layer of a stream, on its way through everything that cells go through."""
    cell = cell_of_all_layers("probe", run.engine, protocol, recipe, placement=placement, stream=stream)
    return float(run.measured(cell, Coder(cell, None))["kl"].mean())


def heard_kl(run: WindowRun, protocol: str, placement: str, stream: str) -> float:
    """KL of a one-bit codec: proof that what the tap returns is used.

    Raises
    ------
    CodecNotActive
        It is so small that what a tap returns cannot have reached the attention.
    """
    kl = probe_kl(run, protocol, placement, stream, CANARY)
    if kl < CANARY_MIN:
        raise CodecNotActive(
            f"a one-bit codec on {stream.upper()} moves the logits of {run.engine.name} ({protocol}, {placement}) by KL"
            f" {kl:.1e} nats only: either what is coded does not reach the attention, or the predictions in window"
            f" {run.number} do not hang on its context, as where it is one token over and over",
            code="not-active.canary",
        )
    return kl


def floor_kl(run: WindowRun, protocol: str, placement: str) -> float:
    """KL of the codec that changes nothing: proof that everything around a codec changes nothing either.

    Raises
    ------
    Fault
        It is above the rounding of the engine's dtype: tensors are mixed up on their way to the codec or back.
    """
    kl = probe_kl(run, protocol, placement, "kv", IDENTITY)
    allowed = SAME[run.engine.dtype]
    if not kl <= allowed:
        raise Fault(
            f"the identity codec moves the logits of {run.engine.name} in {run.engine.dtype} ({protocol}, {placement})"
            f" by KL {kl:.1e} nats; allowed: {allowed:.0e}, its rounding",
            code="fault.floor",
        )
    return kl

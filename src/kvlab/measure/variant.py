"""What is measured in the place of an engine as it is: one interface for codecs, and for what keeps or reads less.

A variant scores one window over that window's clean pass, and says what it stored and read there. Where a codec is put,
one bit and a codec that changes nothing are probed once for all codecs (`scoring.heard_kl`); any other variant proves
by itself that it is at work: what keeps and reads everything leaves the logits alone, next to nothing moves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch

from kvlab.core.errors import CodecNotActive, Fault, WitnessDisagrees
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Cell
from kvlab.core.records import CANARY_MIN, SAME, Coding
from kvlab.core.testimony import Testimony
from kvlab.engines.base import ContextCache, context_of
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import Coder, Tally
from kvlab.measure.scoring import WindowRun
from kvlab.measure.witnessing import examined, witnessed_of
from kvlab.witness.plain import PlainModel
from kvlab.witness.reading import Attend
from kvlab.witness.scores import divergence
from kvlab.witness.testify import TENSORS, array

ITEMSIZE = 2  # bytes of a number that no codec codes
AGREE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Nats per token between a mechanism and its witness: rounding, and now and then a block that is as good as another."""


@dataclass(frozen=True)
class VariantOutcome:
    """What a variant did on one window.

    Parameters
    ----------
    logits : Tensor, shape (scored tokens, vocabulary)
    reference : Tensor, shape (scored tokens, vocabulary)
        Of the untouched model, in passes of the same shape.
    note : dict
        Counts, bytes and seconds as plain data, which a store keeps.
    read : ContextCache or None
        K before its rotary embedding, and V, of the context, as attention is said to have read them; None where a
        witness cannot be given them.
    attend : callable or None
        How attention read them, where that is not all of them; see `witness.reading`.
    """

    logits: torch.Tensor
    reference: torch.Tensor
    note: dict
    read: ContextCache | None = None
    attend: Attend | None = None


@dataclass(frozen=True)
class CacheCost:
    """Bytes of a cache.

    Parameters
    ----------
    bits_per_value : float
        Of the context, every stored byte counted.
    stored : float
        Bytes of a token of the context.
    read : float
        Bytes that a scored token read on average.
    coding : Coding or None
        What a codec wrote; None of what is no codec.
    """

    bits_per_value: float
    stored: float
    read: float
    coding: Coding | None = None


class Variant(ABC):
    """What is done to a cache, or to how it is read.

    Attributes
    ----------
    name : str
    coder : Coder or None
        What codes, or keeps less of, K and V; its tally is that of the last window.
    """

    name: str
    coder: Coder | None = None

    @abstractmethod
    def measure(self, run: WindowRun) -> VariantOutcome:
        """Score a window.

        Raises
        ------
        CodecNotActive
            It did not do what it should on this window.
        """

    def probes(self, run: WindowRun) -> Iterable[VariantOutcome]:
        """What keeps and reads everything, then next to nothing, on the same way as this; none of a codec."""
        return ()

    def canary(self, run: WindowRun) -> float | None:
        """KL of next to nothing in its place, nats per token; None where `probes` are none.

        Raises
        ------
        Fault
            What keeps and reads everything moves the logits.
        CodecNotActive
            Next to nothing leaves them alone.
        """
        kl = []
        for one in self.probes(run):
            reference = run.comparable(one.reference)
            kl.append(reference.compare(one.logits.to(reference.logits.device))["kl"].mean().item())
        if not kl:
            return None
        floor, canary = kl
        if not floor <= SAME[run.engine.dtype]:
            raise Fault(
                f"{self.name}: what keeps and reads everything moves the logits by KL {floor:.1e} nats per token",
                code="fault.floor",
            )
        if not canary >= CANARY_MIN:
            raise CodecNotActive(
                f"{self.name}: next to nothing in its place moves the logits by KL {canary:.1e} nats only: either it"
                " does not reach the attention, or the predictions do not hang on the context",
                code="not-active.canary",
            )
        return canary

    def warm_up(self, run: WindowRun) -> None:
        """Work for nothing once: first calls load kernels and fill tables."""
        if self.coder:
            self.coder.warm_up(run.clean["pre_rope"], run.ids[: run.context], run.number)

    def compute_again(
        self, model: PlainModel, run: WindowRun, outcome: VariantOutcome, rows: pl.DataFrame | None = None
    ) -> Testimony | float | None:
        """Have a witness compute a window again.

        Parameters
        ----------
        rows : polars.DataFrame, optional
            The token rows that are written of it; what a codec's testimony has to be of.

        Returns
        -------
        Testimony, float or None
            A codec's testimony; otherwise the KL from the witness's logits to those of `outcome`, nats per token, or
            None where the witness cannot be given what was read.

        Raises
        ------
        WitnessDisagrees
            The witness comes to something else.
        """
        if outcome.read is None:
            return None
        return computed_again(model, run, outcome.read, outcome.logits, outcome.attend, self.name)

    def cost(self, notes: Sequence[dict], info: ModelInfo, context: int, tokens: int) -> CacheCost:
        """Bytes on windows of so many tokens, from the notes of their outcomes."""
        stored = notes[-1]["stored"]
        read = float(np.mean([one["read"] for one in notes]))
        return CacheCost(8 * stored / info.values_per_token, stored, read)


class CodecVariant(Variant):
    """A codec between an engine and its K and V, as a cell says.

    Parameters
    ----------
    coder : Coder
        Of that cell; its label is the variant's name.
    """

    def __init__(self, coder: Coder):
        self.coder, self.name = coder, coder.cell.label

    @property
    def cell(self) -> Cell:
        """What is coded, where and how."""
        return self.coder.cell

    def measure(self, run: WindowRun) -> VariantOutcome:
        """See `Variant`."""
        self.coder.tally = Tally()
        logits = run.logits(self.cell, self.coder)
        self.coder.refuse_idle(windows=1)
        return VariantOutcome(logits, run.reference_of(self.cell), {"tally": self.coder.tally.to_json()})

    def compute_again(
        self, model: PlainModel, run: WindowRun, outcome: VariantOutcome, rows: pl.DataFrame | None = None
    ) -> Testimony:
        """See `Variant`; the cell runs once more, by a coder of its own, while everything is overheard."""
        seen = examined(model, run, coder_of(self.cell, self.coder.calibrated), run.ids)
        return witnessed_of(seen, self.cell, rows)

    def cost(self, notes: Sequence[dict], info: ModelInfo, context: int, tokens: int) -> CacheCost:
        """See `Variant`."""
        self.coder.tally = Tally.total(one["tally"] for one in notes)
        self.coder.cell = self.cell.model_copy(update={"windows": len(notes)})
        coded = context if self.cell.span == "context" else tokens
        coding = self.coder.coding(info, coded, self.cell.dtype)
        stored = coding.bits_per_value * info.values_per_token / 8
        read = read_of(stored, context, tokens, info)
        return CacheCost(coding.bits_per_value, stored, read, coding)


def read_of(stored: float, context: int, tokens: int, info: ModelInfo) -> float:
    """Bytes that a scored token reads on average: the stored context, and what came since, itself too, in 16 bits.

    A layer with a window reads what is in it alone.

    Parameters
    ----------
    stored : float
        Bytes of a token of the context, of all layers, which are taken to have equal parts in it.
    context, tokens : int
        Of the context, and of the whole window.
    info : ModelInfo
    """
    past = own = 0.0
    for window, layers in Counter(info.windows).items():
        reach = tokens if window is None else window
        since = np.arange(1, tokens - context + 1)  # tokens since the context, the one that reads among them
        past += layers * np.clip(reach - since, 0, context).mean() / info.n_layers
        own += layers * np.minimum(since, reach).mean() / info.n_layers
    return float(stored * past + ITEMSIZE * info.values_per_token * own)


def computed_again(
    model: PlainModel,
    run: WindowRun,
    held: ContextCache,
    logits: torch.Tensor,
    attend: Attend | None,
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
    kl = float(divergence(array(passed.logits), array(logits)).mean())
    if not kl <= AGREE[dtype]:
        raise WitnessDisagrees(
            f"{name}, window {run.number}: a plain forward's logits are KL {kl:.1e} nats per token away; allowed:"
            f" {AGREE[dtype]:.0e}",
            code="witness.other-logits",
        )
    return kl

"""Mechanisms at work on the windows of one eval: any variant of the library, or an engine with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.engines.base import Engine, Storage
from kvlab.measure.coding import Coder, now
from kvlab.measure.engines import Visit, Which
from kvlab.measure.scoring import WindowRun
from kvlab.measure.store import Found
from kvlab.measure.subjects import code_of, deciding
from kvlab.measure.variant import Variant, VariantOutcome
from kvlab.measure.windows import Window
from kvlab_pipeline.jobs.measure import Lab, calibrated_for
from kvlab_pipeline.studies.mechanisms.items import SCORERS, TEXTS, VERSIONS
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY, METRICS, PlannedVariant, protocols


class Seconds(NamedTuple):
    """What one window took: the engine's pass with the coding, and of that encoding and decoding."""

    whole: float
    encode: float
    decode: float


@dataclass(eq=False)
class OwnCache(Variant):
    """An engine with a cache of its own, or the engine as it is once more: a second pass, timed.

    Parameters
    ----------
    engine : callable
        Gives it, started when first asked for.
    paged : bool
        Whether it codes its own pages.
    """

    name: str
    engine: Callable[[], Engine]
    paged: bool

    def measure(self, run: WindowRun) -> VariantOutcome:
        """See `Variant`."""
        engine, began = self.engine(), now(run.reference)
        logits = engine.score(run.ids, run.context)
        note = {"seconds": now(logits) - began} | (passed(engine, run) if self.paged else {})
        return VariantOutcome(logits, run.reference, note)

    def warm_up(self, run: WindowRun) -> None:
        """See `Variant`."""
        self.engine().score(run.ids, run.context)


@dataclass(eq=False)
class EvalSubject:
    """One variant on the windows of one eval, held against the same engine as it is (`loop.Subject`).

    Parameters
    ----------
    planned : PlannedVariant
    which, plain : Which
        The engine that it runs on, and that engine as it is.
    variant : Variant or None
        At work, shared by the evals that are scored in passes; None where that is somebody else's (`cached`) and where
        the clean pass has the answer already: a needle, asked of the engine as it is.
    """

    quality_eval_id: str
    planned: PlannedVariant
    lab: Lab
    which: Which
    plain: Which
    variant: Variant | None
    _canary: float | None = None
    _warm: bool = False
    _identity: dict | None = None

    @property
    def coder(self) -> Coder | None:
        """What runs beside the engine's own cache; its tally is that of the window in hand."""
        return self.variant and self.variant.coder

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return window.text == TEXTS[self.quality_eval_id]

    def identity(self) -> dict | None:
        """See `loop.FindingStore`: the eval with its version, the engine, and what is done to K and V."""
        if self._identity is None:
            planned, cell = self.planned, self.planned.cell
            own = [type(one).__module__ for one in (self, self.variant, self.coder) if one is not None]
            measuring = code_of(self.which, cell.recipes if cell else (), __name__, *own)
            if measuring is None:
                return None
            done = deciding(cell, calibrated_for(cell, self.lab.calibrated)) if cell else {}
            named = {"kind": "mechanism", "eval": self.quality_eval_id, "version": VERSIONS[self.quality_eval_id]}
            if planned.pattern:
                done |= {"pattern": planned.pattern}
            if planned.kept:  # latents are fitted to the text of the calibration
                done |= {"kept": planned.kept, "corpus": self.lab.windows.corpus_hash}
            self._identity = named | {"engine": list(self.which), "code": measuring} | done
        return self._identity

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`: the eval's metrics, those of the engine as it is, and what it took.

        Raises
        ------
        CodecNotActive
            The variant is not at work: on the first window of text, or on this one.
        Fault
            What keeps and reads everything moves the logits.
        WitnessDisagrees
            A witness of the last window of text comes to something else.
        """
        run, window = visit.run(self.plain), visit.window
        text, judge = self.quality_eval_id == FIDELITY, SCORERS[self.quality_eval_id]
        if text and not self._warm:
            self._warm = True
            self.variant.warm_up(run)
            self._canary = self.variant.canary(run)
        outcome = self.variant.measure(run) if self.variant else VariantOutcome(run.reference, self._as_it_is(run), {})
        reference = run.comparable(outcome.reference, window.first)
        logits = outcome.logits[window.first :].to(reference.logits.device)
        note = outcome.note | {"variant": judge(reference, logits), "baseline": judge(reference, reference.logits)}
        if text and self._canary is not None:
            note["canary"] = self._canary
        if text and window.number == len(self.lab.windows.test) - 1 and outcome.read is not None:
            note["witnessed"] = self.variant.compute_again(self.lab.plain(), run, outcome)
        engine = visit.engines.get(self.which)
        note["storage"] = asdict(engine.storage)
        if not self.coder and not self.planned.pattern:  # the engine's own cache, and how large it is by its own count
            note |= {"backend": engine.proof.attention, "pool": engine.pool and engine.pool.model_dump()}
        return Found(note)

    def _as_it_is(self, run: WindowRun) -> torch.Tensor:
        """Logits of the engine as it is, in the passes that the rows of its protocol are held against."""
        # its row of text tells what a second pass of the same kind costs, and is held against one pass
        protocol = self.planned.protocol(protocols(self.lab.params, self.plain.name))
        return run.over_clean if protocol == "snapshot" else run.reference


def passed(engine: Engine, run: WindowRun) -> dict:
    """What an engine of coded pages did with a window, by its own account.

    Raises
    ------
    CodecNotActive
        It did not code K and V of each layer once, or other tokens than the window's.
    """
    found, due = engine.passed, (2 * engine.info.n_layers, len(run.ids))
    if (found.fires, found.tokens) != due:
        raise CodecNotActive(
            f"vLLM coded {found.tokens} tokens {found.fires} times into its pages, of a window of {due[1]} tokens, each"
            f" of whose layers and streams is coded once: {due[0]} times",
            code="not-active.other-window",
        )
    told = {"served": engine.served.model_dump(), "canary": engine.canary_kl}
    return told | {"fires": found.fires, "seconds": found.seconds}


def storage_of(note: dict) -> Storage:
    """What the engine held K and V in."""
    return Storage(**note["storage"])


def score_rows(subject: EvalSubject, found: list[tuple[Window, Found]]) -> list[dict]:
    """What was found, as rows of `records.SCORES`."""
    rows = []
    for window, one in found:
        for metric in METRICS[subject.quality_eval_id]:
            place = {"label": subject.planned.label, "quality_eval_id": subject.quality_eval_id, "metric": metric}
            values = {name: one.note[name][metric] for name in ("variant", "baseline")}
            rows.append(place | {"item": window.number} | values)
    return rows


def refuse_unread(device: str, cache_dtype: str) -> None:
    """`CapabilityError` on an accelerator, where the pass of a prompt may never read the cache that it fills."""
    if device != "cpu":
        raise CapabilityError(
            f"a cache of {cache_dtype} on {device} is not scored in a prompt's own pass, which may not read what it"
            " stores; measure it by decoding: kvlab eval --cache-dtype",
            code="capability.unread",
        )

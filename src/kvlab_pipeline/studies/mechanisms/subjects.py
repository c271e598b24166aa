"""Mechanisms at work: a codec as a tap, or an engine's own cache, on the windows of one eval."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.engines.base import Engine, Storage
from kvlab.measure.coding import Coder, Tally, now
from kvlab.measure.engines import Visit, Which
from kvlab.measure.scoring import WindowRun
from kvlab.measure.store import Found
from kvlab.measure.subjects import code_of, deciding, noted, refuse_idle
from kvlab.measure.windows import Window
from kvlab_pipeline.jobs.measure import Lab, calibrated_for
from kvlab_pipeline.studies.mechanisms.items import SCORERS, TEXTS, VERSIONS
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY, METRICS, Variant, protocols


class Seconds(NamedTuple):
    """What one window took: the engine's pass with the coding, and of that encoding and decoding."""

    whole: float
    encode: float
    decode: float


@dataclass(eq=False)
class VariantSubject:
    """One variant on the windows of one eval, held against the same engine as it is.

    Parameters
    ----------
    coder : Coder or None
        Of a codec that runs beside the engine's own cache; the evals of a variant share it, as its tally is that of the
        window in hand.
    which, plain : Which
        The engine that it runs on, and that engine as it is.
    """

    quality_eval_id: str
    variant: Variant
    lab: Lab
    which: Which
    plain: Which
    coder: Coder | None
    _warm: bool = False
    _identity: dict | None = None

    def due(self, window: Window) -> bool:
        """See `loop.Subject`."""
        return window.text == TEXTS[self.quality_eval_id]

    def identity(self) -> dict | None:
        """See `loop.FindingStore`: the eval with its version, the engine, and what is done to K and V."""
        if self._identity is None:
            cell = self.variant.cell
            own = [type(one).__module__ for one in (self, self.coder) if one is not None]
            measuring = code_of(self.which, cell.recipes if cell else (), __name__, *own)
            if measuring is None:
                return None
            done = deciding(cell, calibrated_for(cell, self.lab.calibrated)) if cell else {}
            named = {"kind": "mechanism", "eval": self.quality_eval_id, "version": VERSIONS[self.quality_eval_id]}
            if self.variant.kept:  # latents are fitted to the text of the calibration
                done |= {"kept": self.variant.kept, "corpus": self.lab.windows.corpus_hash}
            self._identity = named | {"engine": list(self.which), "code": measuring} | done
        return self._identity

    def score(self, visit: Visit) -> Found:
        """See `loop.Subject`: the eval's metrics, those of the engine as it is, and what it took.

        Raises
        ------
        CodecNotActive
            The codec did not fire as often as it should have on this window.
        """
        run, first = visit.run(self.plain), visit.window.first
        reference = run.comparable(self._held_against(run), first)
        judge, note = SCORERS[self.quality_eval_id], {}
        if self.coder:
            note = self._coded(visit)
        elif self._reruns:
            note = self._scored(visit)
        logits = note.pop("logits", run.reference)[first:].to(reference.logits.device)
        note |= {"variant": judge(reference, logits), "baseline": judge(reference, reference.logits)}
        engine = visit.engines.get(self.which)
        note["storage"] = asdict(engine.storage)
        if not self.coder:  # the engine's own cache, and how large it is by its own count
            note |= {"backend": engine.proof.attention, "pool": engine.pool and engine.pool.model_dump()}
        return Found(note)

    def _held_against(self, run: WindowRun) -> torch.Tensor:
        """Logits of the engine as it is, in the passes that all rows of this one's protocol are held against."""
        if self.coder:
            return run.reference_of(self.variant.cell)
        # The engine's own row of text tells what a second pass of the same kind costs: it is held against one pass.
        protocol = self.variant.protocol(protocols(self.lab.params, self.plain.name))
        return run.over_clean if protocol == "snapshot" and not self._reruns else run.reference

    @property
    def _reruns(self) -> bool:
        """Whether the engine is run again: the engine as it is has answered a needle in the clean pass already."""
        return self.quality_eval_id == FIDELITY or self.which != self.plain

    def _coded(self, visit: Visit) -> dict:
        run, cell = visit.run(self.plain), self.variant.cell
        if not self._warm and self.quality_eval_id == FIDELITY:
            self.warm_up(visit)
        self.coder.tally = Tally()
        logits = run.logits(cell, self.coder)
        refuse_idle(self.coder)
        return {"logits": logits, "tally": noted(self.coder.tally)}

    def _scored(self, visit: Visit) -> dict:
        """A pass of the engine, timed."""
        engine, window = visit.engines.get(self.which), visit.window
        if not self._warm:
            self.warm_up(visit)
        began = now(visit.run(self.plain).reference)
        logits = engine.score(list(window.ids), window.context)
        took = {"logits": logits, "seconds": now(logits) - began}
        return took | passed(engine, window) if self.variant.paged else took

    def warm_up(self, visit: Visit) -> None:
        """Work for nothing once: first calls load kernels and fill tables, which no request pays for."""
        self._warm = True
        if self.coder is None:
            visit.engines.get(self.which).score(list(visit.window.ids), visit.window.context)
            return
        run = visit.run(self.plain)
        self.coder.warm_up(run.clean["pre_rope"], run.ids[: run.context], run.number)


def passed(engine: Engine, window: Window) -> dict:
    """What an engine of coded pages did with a window, by its own account.

    Raises
    ------
    CodecNotActive
        It did not code K and V of each layer once, or other tokens than the window's.
    """
    found, due = engine.passed, (2 * engine.info.n_layers, len(window.ids))
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


def score_rows(subject: VariantSubject, found: list[tuple[Window, Found]]) -> list[dict]:
    """What was found, as rows of `records.SCORES`."""
    rows = []
    for window, one in found:
        for metric in METRICS[subject.quality_eval_id]:
            place = {"label": subject.variant.label, "quality_eval_id": subject.quality_eval_id, "metric": metric}
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

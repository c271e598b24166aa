"""Attention that reads less, on the windows of one eval, as a row for the gate.

K and V are stored as they are and are those of the pass itself; what a step reads is counted where attention runs. On
the first window of text it has to be shown that the pattern is at work: reading everything on the same way leaves the
logits alone, and reading the last token alone moves them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil

from kvlab.attention.hf import attending, plan_of
from kvlab.attention.layer_plan import LayerPlan
from kvlab.attention.named import mechanism
from kvlab.attention.patterns import Full, SlidingWindow
from kvlab.core.model import ModelInfo
from kvlab.measure.coding import now
from kvlab.measure.engines import Visit
from kvlab.measure.mechanism import refuse_unheard
from kvlab.measure.store import Found
from kvlab.measure.windows import Window as Scored
from kvlab_pipeline.studies.mechanisms.items import SCORERS, fidelity
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY
from kvlab_pipeline.studies.mechanisms.subjects import VariantSubject


@dataclass(eq=False)
class Patterned(VariantSubject):
    """A pattern on the windows of one eval, held against the same engine as it is."""

    _canary: float | None = None

    def identity(self) -> dict | None:
        """See `loop.FindingStore`: the pattern beside all that a subject is."""
        found = super().identity()
        return found and found | {"pattern": self.variant.pattern}

    def score(self, visit: Visit) -> Found:
        """See `VariantSubject.score`.

        Raises
        ------
        CodecNotActive
            The pattern did not run in each layer, left nothing out, or does not move the logits when it reads next to
            nothing.
        Fault
            Reading everything moves them.
        """
        run, first = visit.run(self.plain), visit.window.first
        engine, judge = visit.engines.get(self.which), SCORERS[self.quality_eval_id]
        plan = mechanism(self.variant.pattern).plan(engine.info.n_layers, visit.window.context)
        reference = run.comparable(run.reference, first)
        if self.quality_eval_id == FIDELITY and self._canary is None:
            self._canary = self._probed(visit, reference)
        note, logits = self._read(visit, plan)
        logits = logits[first:].to(reference.logits.device)
        note |= {"variant": judge(reference, logits), "baseline": judge(reference, reference.logits)}
        return Found(note | {"canary": self._canary, "storage": asdict(engine.storage), "backend": None, "pool": None})

    def _read(self, visit: Visit, plan: LayerPlan) -> tuple[dict, object]:
        """What was read, and how long it took; the logits of the tokens after the context."""
        engine, window = visit.engines.get(self.which), visit.window
        with attending(engine.model, plan) as effect:
            began = now(visit.run(self.plain).reference)
            logits = engine.score(list(window.ids), window.context)
            took = now(logits) - began
            names = {pattern.name for pattern in plan_of(engine.model) or ()}
        effect.refuse_idle(plan)
        vectors = effect.read(len(window.ids) - window.context)
        read = vectors * engine.info.head_dim * engine.storage.itemsize
        return {"seconds": took, "pattern": " and ".join(sorted(names)), "read": read}, logits

    def _probed(self, visit: Visit, reference) -> float:
        """KL of reading the last token alone, nats per token, after what reads everything was seen to be exact."""
        engine, window, first = visit.engines.get(self.which), visit.window, visit.window.first
        seen = []
        for pattern in (Full(), SlidingWindow(1)):
            with attending(engine.model, (pattern,) * engine.info.n_layers):
                logits = engine.score(list(window.ids), window.context)[first:]
            seen.append(fidelity(reference, logits.to(reference.logits.device))["kl"])
        refuse_unheard(self.variant.label, *seen, engine.dtype)
        return seen[1]


def read_counts(pattern: str, found: list[tuple[Scored, Found]], info: ModelInfo, itemsize: int) -> dict[str, int]:
    """What was stored and read of the contexts: K and V of every token, and the vectors that a pattern chooses by."""
    tokens = sum(window.context for window, _ in found)
    (one,) = {one.indexed for one in mechanism(pattern).plan(1, 0)}
    beside = ceil(one * tokens * info.n_layers * info.n_kv_heads * info.head_dim)
    values = tokens * info.values_per_token
    return {
        "fires": 0,
        "expected_fires": 0,
        "kv_bytes": (values + beside) * itemsize,
        "kv_values": values,
        "read_bytes": ceil(sum(one.note["read"] for _, one in found)),
    }

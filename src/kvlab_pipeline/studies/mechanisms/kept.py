"""What keeps less of a finished context, on the windows of one eval, as a row for the gate.

A latent cache or an eviction runs where a codec would: its coder is given the context's clean cache, counts what it
keeps of it, and the tokens after the context are computed over that. On the first window of text it has to be shown
that it is at work: keeping everything on the same way leaves the logits alone, and keeping next to nothing moves them.
The last one is computed again by a witness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.attention.named import mechanism
from kvlab.measure.engines import Visit
from kvlab.measure.eviction import KeepingCoder
from kvlab.measure.mechanism import Keeping, attention_over, computed_again, extremes, over_kept, refuse_unheard
from kvlab.measure.scoring import WindowRun
from kvlab.measure.subjects import noted
from kvlab_pipeline.studies.mechanisms.items import fidelity
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY
from kvlab_pipeline.studies.mechanisms.subjects import VariantSubject


@dataclass(eq=False)
class KeptLess(VariantSubject):
    """A latent cache or an eviction on the windows of one eval, held against the same engine as it is.

    Parameters
    ----------
    keeper : callable
        Makes a coder of what is kept, which keeps its numbers as they are computed.
    """

    keeper: Callable[[Keeping], KeepingCoder] | None = None
    _canary: float | None = None

    def _coded(self, visit: Visit) -> dict:
        """See `VariantSubject`; with what next to nothing does in its place, and a witness's KL of the last window."""
        run, text = visit.run(self.plain), self.quality_eval_id == FIDELITY
        if text and self._canary is None:
            self.warm_up(visit)
            self._canary = self._probed(run)  # refuses a way that does not reach attention
        logits, held = over_kept(run, self.coder)
        note = {"canary": self._canary, "pattern": mechanism(self.variant.kept).told}
        if text and visit.window.number == len(self.lab.windows.test) - 1:
            again = self.lab.plain(), run, self.coder.made, logits, attention_over(held), self.variant.label
            note["witnessed"] = computed_again(*again)
        return note | {"logits": logits, "tally": noted(self.coder.tally)}

    def _probed(self, run: WindowRun) -> float:
        """KL of next to nothing, nats per token, after what keeps everything was seen to be exact."""
        reference, found = run.comparable(run.over_clean), []
        for extreme in extremes(mechanism(self.variant.kept), self.lab.info, run.context):
            logits, _ = over_kept(run, self.keeper(extreme))
            found.append(fidelity(reference, logits.to(reference.logits.device))["kl"])
        refuse_unheard(self.variant.label, *found, run.engine.dtype)
        return found[1]

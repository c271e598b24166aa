"""What the study of tradeoffs leaves. Torch-free."""

from __future__ import annotations

from kvlab.core.codec_settings import Frozen
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.studies.record import StudyRecord
from kvlab_pipeline.studies.tradeoffs.params import Tradeoffs


class ArmFound(Frozen):
    """One arm.

    `stored` are bytes that a token of the context takes in all layers, `read` those that a step reads on average,
    `found` the share of the needles, `per_second` tokens of the runnable form here (None: there is none), `witnessed`
    the KL to a second computation of one window, nats per token (None: not computed twice). `against` is the paired
    difference of KL to the arm named `rival`: of the first codec the widest that stores no more; None where none does.
    """

    name: str
    family: str
    recipe_id: str | None
    kl: Estimate
    top1: Estimate
    found: Estimate
    stored: float
    read: float
    per_second: float | None
    witnessed: float | None
    rival: str | None = None
    against: Estimate | None = None


class Drafted(Frozen):
    """Self-speculation of one codec.

    `accepted` is the share of drafted tokens that the exact cache writes too, over prompts; `coded` and `exact` are
    bytes that a token of the context takes in both caches. Of `tokens_per_call` and `draft` follows what a written
    token reads.
    """

    name: str
    recipe_id: str
    accepted: Estimate
    tokens_per_call: float
    draft: int
    coded: float
    exact: float
    per_second: float
    plain_per_second: float

    @property
    def stored(self) -> float:
        """Of both caches."""
        return self.coded + self.exact

    def read(self, tokens: float) -> float:
        """Bytes per written token over so many tokens: drafts read the coded cache, a verifying call the exact one."""
        return (self.draft * self.coded + self.exact) * tokens / self.tokens_per_call


class TradeoffsRecord(StudyRecord):
    """The JSON of the study; `text` is ``other``, or ``test`` where no other was cut.

    `full` and `full_read` are bytes of 16 bits, `exact_found` the needles without any arm.
    """

    machine: dict
    threads: int
    settings: Tradeoffs
    context: int
    eval: int
    values: int
    text: str = "other"
    confidence: float
    rounding: Estimate
    full_read: float
    exact_found: Estimate
    exact_per_second: float
    arms: tuple[ArmFound, ...]
    drafted: tuple[Drafted, ...]

    @property
    def full(self) -> float:
        """Bytes of a token in 16 bits."""
        return 2.0 * self.values

    @property
    def tokens(self) -> float:
        """Tokens that a step has before it, on average."""
        return self.full_read / self.full


RECORD = TradeoffsRecord

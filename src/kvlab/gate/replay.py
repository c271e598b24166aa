"""What measuring again found: without it no row is certified, however good its evidence looks.

Evidence that is made up as a whole agrees with itself, and nothing in it says so. A second measurement does. Who makes
one, and of what, is no part of the gate: `kvlab.gate.check.check` is given a function that does, asks it in the same
call in which it judges, and believes no file that says what another call found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from kvlab.core.codec_settings import Frozen
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.reasons import Reason

NOT_REPLAYED = "not measured again"
"""What is said of a row that earns the best tier and is not certified."""
DIGITS = 12
"""Of a code's digest, as pages show it."""


class ReplayedScore(Frozen):
    """One score of the record and what it was when it was measured again, in the metric's unit.

    `of` is ``variant`` or ``baseline``: the row itself, or the engine as it is beside it.
    """

    quality_eval_id: str
    metric: str
    item: int
    of: Literal["variant", "baseline"]
    claimed: float
    found: float


class Replay(Frozen):
    """What was found when some items of a row were measured again.

    Parameters
    ----------
    scores : tuple of ReplayedScore
        Of the items that were drawn.
    differs : tuple of Reason
        What is not as the row or its record says.
    lacking : str or None
        Why nothing could be measured again; that speaks neither for the row nor against it.
    measured_by, code : str or None
        Digests of the code that measured the row, by its record, and of that which measured again; None where one
        cannot be had.
    at : str
        When, UTC, ISO 8601.
    """

    scores: tuple[ReplayedScore, ...] = ()
    differs: tuple[Reason, ...] = ()
    lacking: str | None = None
    measured_by: str | None = None
    code: str | None = None
    at: str

    @property
    def agrees(self) -> bool:
        """Whether something was measured again, and all of it came out as it was said."""
        return bool(self.scores) and not self.differs and self.lacking is None

    @property
    def equal(self) -> int:
        """How many scores came out the same, to the last bit."""
        return sum(score.claimed == score.found for score in self.scores)

    @property
    def same_code(self) -> bool:
        """Whether the code that measured and the code that measured again are known to be one."""
        return self.code is not None and self.code == self.measured_by

    @property
    def codes(self) -> tuple[str, str]:
        """The code that measured and the code that measured again, as pages name them."""
        first, second = (one[:DIGITS] if one else "not known" for one in (self.measured_by, self.code))
        return first, "the same" if self.same_code else f"another, {second}" if self.code else second


Replayer = Callable[[Sequence[Row]], Sequence[Replay]]
"""Measures some items of each row again; the answers are in the order of the rows."""

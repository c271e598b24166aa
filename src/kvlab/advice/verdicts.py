"""What a measured KL divergence says of a cache format, in one word: the rule of `kvlab recommend` and `kvlab check`.

Three bounds of the scale of `kvlab.stats.kl_scale` part four classes:

    safe        below what 8-bit weights cost (q8_0), or below what 16 bits of K and V cost this model, if that is more
    small       below what 5-bit weights cost (q5_K_M)
    noticeable  below what 3-bit weights cost (q3_K_M)
    broken      all above

A class is said where both ends of the KL's interval lie in it. Otherwise the verdict is *cannot tell*, with the classes
that it may be. What may be taken is decided by the upper end alone, what is refused by the lower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvlab.stats.kl_scale import SMALL, STEPS

if TYPE_CHECKING:  # numpy comes with it
    from kvlab.stats.bootstrap import Estimate

Loss = Literal["safe", "small", "noticeable"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
BROKEN, OPEN = "broken", "cannot tell"
CLASSES = (*LOSSES, BROKEN)
SAFE, NOTICEABLE = STEPS[0], STEPS[4]
Answer = Literal["yes", "no", "cannot tell"]


class Verdict(NamedTuple):
    """A word, and the classes that both ends of the interval and all between them lie in."""

    word: str
    possible: tuple[str, ...]

    @property
    def told(self) -> str:
        """For people."""
        return self.word if self.word != OPEN else f"{OPEN}: {self.possible[0]} to {self.possible[-1]}"


def bound(loss: Loss, floor: float = 0.0) -> float:
    """Nats per token that a format of this class stays below.

    Parameters
    ----------
    loss : {"safe", "small", "noticeable"}
    floor : float
        KL that storing K and V in 16 bits costs the same model on the same text.
    """
    return {"safe": min(max(SAFE.kl, floor), SMALL.kl), "small": SMALL.kl, "noticeable": NOTICEABLE.kl}[loss]


def verdict(kl: Estimate, floor: float = 0.0) -> Verdict:
    """The verdict on a mean KL, nats per token; parameters as of `bound`."""
    first, last = (sum(end >= bound(loss, floor) for loss in LOSSES) for end in (kl.low, kl.high))
    possible = CLASSES[first : last + 1]
    return Verdict(possible[0] if len(possible) == 1 else OPEN, possible)


def answer(kl: Estimate, loss: Loss, floor: float = 0.0) -> Answer:
    """Whether a format surely costs no more than `loss`: the whole interval on one side of its bound, or neither."""
    if kl.high < bound(loss, floor):
        return "yes"
    return "no" if kl.low >= bound(loss, floor) else OPEN

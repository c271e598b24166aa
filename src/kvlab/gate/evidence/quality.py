"""Whether a variant lost more quality than is allowed: one word per metric, decided by the bounds of an interval.

The loss is the paired difference of the variant and the baseline over the same items, positive when the variant is
worse. What is allowed is counted in standard errors of the BASELINE: a tolerance that came from the variant's own
scatter would grow with the damage it is meant to catch.

How often a word is wrong. ``beyond`` needs the lower end of a two-sided 95 % interval above the tolerance. Where the
true loss is at most the tolerance, that end is then above the true loss too, which an interval that covers what it
says does at most 2.5 % of the time. The baseline against itself has a true loss of 0 and a tolerance above it, so it
is called ``beyond`` more rarely still. Likewise a variant that truly loses more than the tolerance is called
``within`` at most 2.5 % of the time. Over several metrics the first risk adds up (2.5 % each at most), the second
does not, since all of them must be ``within`` (Berger 1982, Technometrics 24:295). `power` measures both.

When ``within`` can be reached. A variant without loss is ``within`` when the upper side of its paired interval, about
1.96 of its standard errors, fits into the tolerance. While that is `tolerance_se` standard errors of the baseline,
both shrink with the root of the number of items and more items do not help: what helps is that few items change.
For scores of 0 and 1 with rate p and a share q of changed items it takes about
``q <= p (1 - p) (tolerance_se / 1.96)^2``; at p = 0.9 and two standard errors, nine items of a hundred. Two runs that
share nothing but p have q = 2 p (1 - p) and need 2.8 standard errors. A variant that changes nothing needs 1.96 where
the baseline misses nothing or nothing but a few items (`measures.rate_se`), so a smaller `tolerance_se` can be out of
reach for good. Where the cap `tolerance_max` binds, it is a matter of items alone: with none changed, the upper end
is at 3.7 / n, so a cap of 0.02 takes 183.

Because a tolerance in standard errors shrinks as items are added, it forgives only what the baseline's own noise
could hide, and any real loss is ``beyond`` it in the end: whoever means to allow a fixed loss sets `tolerance_se` to
None and lets the cap decide. The cap alone must decide where the baseline scores itself exactly, as its own kl of 0
does: it has no noise to count in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvlab.base.recipe import Frozen
from kvlab.gate.evidence.measures import Measure
from kvlab.gate.registry.entries import Metric
from kvlab.stats.power import windows_needed

Word = Literal["within", "open", "beyond"]
OUT_OF_REACH = 1e4  # an interval that would have to shrink by more, with 10^8 times the items, is not settled by items


class Judgement(Frozen):
    """The word on one metric and what it rests on, in the metric's unit.

    `loss` with `low` and `high` is positive where the variant is worse; these and `tolerance` are None where an eval
    needs no baseline and the floor decides alone. `margin` is from the floor to the nearer end of the value's
    interval, negative when that end misses it, and None without a floor. `needed_n` is the number of items after
    which an open word would be settled if the values stay as they are; None when the word is not open, or when no
    number of items settles it.
    """

    key: str
    word: Word
    tolerance: float | None
    loss: float | None
    low: float | None
    high: float | None
    margin: float | None
    needed_n: int | None


def judge(metric: Metric, baseline: Measure | None, paired: Measure | None, value: Measure) -> Judgement:
    """The word on one metric.

    ``within`` when the loss's upper end is at most the tolerance and the value's whole interval meets the floor;
    ``beyond`` when the loss's lower end is above the tolerance or the whole interval misses the floor; otherwise
    ``open``. An eval too small for its cap is judged at the cap all the same, and so stays open.

    Parameters
    ----------
    metric : Metric
    baseline : Measure or None
        The baseline's own value; its standard error makes the tolerance.
    paired : Measure or None
        Variant minus baseline over the same items. None for `baseline` or `paired`: the floor decides alone, and
        without a floor the word is ``open``.
    value : Measure
        The variant's own value.

    Returns
    -------
    Judgement
    """
    sign = 1 if metric.direction == "lower" else -1
    loss = None
    if baseline is not None and paired is not None:
        noise = _allowed_noise(metric.tolerance_se, baseline.se)
        loss = _Loss(_Range.of(paired, sign), noise, metric.tolerance_max)
    room = None if metric.floor is None else _Range.of(value, -sign, metric.floor)
    word = _word(loss, room)
    return Judgement(
        key=metric.key,
        word=word,
        tolerance=loss and loss.tolerance,
        loss=loss and loss.range.value,
        low=loss and loss.range.low,
        high=loss and loss.range.high,
        margin=room and room.low,
        needed_n=_needed(loss, room, (paired or value).n) if word == "open" else None,
    )


def tolerance(metric: Metric, baseline_se):
    """Allowed loss in the metric's unit: standard errors of the baseline, capped; elementwise on arrays."""
    noise = _allowed_noise(metric.tolerance_se, baseline_se)
    return np.broadcast_to(np.minimum(noise, metric.tolerance_max), np.shape(baseline_se))


def is_within(high, tolerance):
    """Whether the upper end of a loss fits into the tolerance; elementwise on arrays."""
    return high <= tolerance


def is_beyond(low, tolerance):
    """Whether the lower end of a loss is above the tolerance; elementwise on arrays."""
    return low > tolerance


def _allowed_noise(tolerance_se: float | None, baseline_se):
    """What the baseline's noise could hide; no limit where the baseline scores itself and so has none."""
    return math.inf if tolerance_se is None else tolerance_se * baseline_se


# --------------------------------------------------------------------- what a word is made of


@dataclass(frozen=True)
class _Range:
    """A value between two ends."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, measure: Measure, sign: int, origin: float = 0.0) -> _Range:
        """The measure from `origin`, turned so that `sign` points up."""
        ends = sorted((sign * (measure.low - origin), sign * (measure.high - origin)))
        return cls(sign * (measure.value - origin) + 0.0, *ends)  # + 0.0: no loss is not -0.0

    def scaled(self, factor: float) -> _Range:
        """Both sides shrunk by `factor`."""
        return _Range(
            self.value, self.value - factor * (self.value - self.low), self.value + factor * (self.high - self.value)
        )


@dataclass(frozen=True)
class _Loss:
    """A loss, what the baseline's noise allows, and the cap."""

    range: _Range
    noise: float
    cap: float

    @property
    def tolerance(self) -> float:
        return min(self.noise, self.cap)

    def scaled(self, factor: float) -> _Loss:
        """After more items: the baseline's noise shrinks as the interval does, the cap stays."""
        return replace(self, range=self.range.scaled(factor), noise=factor * self.noise)


def _word(loss: _Loss | None, room: _Range | None) -> Word:
    """`room` is the range of the value above its floor, so 0 is the floor."""
    if (loss and is_beyond(loss.range.low, loss.tolerance)) or (room and room.high < 0):
        return "beyond"
    met = [is_within(loss.range.high, loss.tolerance)] if loss else []
    met += [room.low >= 0] if room else []
    return "within" if met and all(met) else "open"


def _needed(loss: _Loss | None, room: _Range | None, n: int) -> int | None:
    """The fewest items after which the word is not open any more: one of those where some end meets some limit."""
    for items in sorted(_crossings(loss, room, n)):
        shrink = math.sqrt(n / items)
        if _word(loss and loss.scaled(shrink), room and room.scaled(shrink)) != "open":
            return items
    return None


def _crossings(loss: _Loss | None, room: _Range | None, n: int) -> set[int]:
    """Where an end of an interval passes the cap, the shrinking noise, or the floor."""
    found = []
    if loss:
        value, below, above = loss.range.value, loss.range.value - loss.range.low, loss.range.high - loss.range.value
        found += [_items(above, loss.cap - value, n), _items(below, value - loss.cap, n)]
        found += [_items(above - loss.noise, -value, n), _items(below + loss.noise, value, n)]
    if room:
        found += [_items(room.value - room.low, room.value, n), _items(room.high - room.value, -room.value, n)]
    return {items for items in found if items is not None}


def _items(width: float, distance: float, n: int) -> int | None:
    """`windows_needed`, which knows no largest number; None where it would be one that nobody can measure."""
    return windows_needed(width, distance, n) if abs(width) < OUT_OF_REACH * distance else None

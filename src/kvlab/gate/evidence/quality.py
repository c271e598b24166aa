"""Whether a variant lost more quality than is allowed: one word per metric, decided by the bounds of an interval.

The loss is the paired difference of the variant and the baseline over the same items, positive when the variant is
worse. What is allowed is a margin of non-inferiority, fixed in the registry: it hangs neither on the variant nor on
the number of items, so more items can only bring a word nearer to the truth. A margin in standard errors shrinks as
items are added, and the same loss that a small eval certifies is beyond it in a larger one.

How often a word is wrong. ``beyond`` needs the lower end of a two-sided 95 % interval above the margin. Where the
true loss is at most the margin, that end is then above the true loss too, which an interval that covers what it
says does at most 2.5 % of the time. The baseline against itself has a true loss of 0 and a margin above it, so it
is called ``beyond`` more rarely still. Likewise a variant that truly loses more than the margin is called
``within`` at most 2.5 % of the time. Over several metrics the first risk adds up (2.5 % each at most), the second
does not, since all of them must be ``within`` (intersection-union test, Berger 1982, Technometrics 24:295): so the
p-value of a row is the largest of its metrics'. Over several rows the second risk adds up too;
`kvlab.gate.multiple_testing` controls it. `power` measures both.

When ``within`` can be reached. A variant without loss is ``within`` when the upper side of its paired interval fits
into the margin, which is a matter of items alone: with none changed, the upper end is at 3.7 / n, so a margin of 0.02
takes 183.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from kvlab.core.codec_settings import Frozen
from kvlab.gate.evidence.measures import FEWEST, LEVELS, Measure, bounds_of
from kvlab.gate.registry.entries import Metric
from kvlab.stats.power import windows_needed

Word = Literal["within", "open", "beyond"]
OUT_OF_REACH = 1e4  # an interval that would have to shrink by more, with 10^8 times the items, is not settled by items
NOT_INSIDE = 1.0  # the p-value where not even the printed interval is inside: how much larger than `ALPHA` is not asked


class Judgement(Frozen):
    """The word on one metric and what it rests on, in the metric's unit.

    `loss` with `low` and `high` is positive where the variant is worse, and `high` the bound by which it is certified.
    These and `margin` are None where an eval needs no baseline and the floor decides alone. `room` is from the floor to
    the nearer end of the value's interval, negative when that end misses it, and None without a floor. `p` is the
    p-value of "the loss is at least the margin, or the value misses its floor", rounded up to `LEVELS`, and
    `NOT_INSIDE` where the word is not ``within``.
    `needed_n` is the number of items after which an open word would be settled if the values stay as they are; None
    when the word is not open, or when no number of items settles it. `untold` where the baseline is not shown to meet
    the floor: see `beside`.
    """

    key: str
    word: Word
    margin: float | None
    loss: float | None
    low: float | None
    high: float | None
    room: float | None
    p: float = NOT_INSIDE
    needed_n: int | None
    untold: bool = False


def judge(metric: Metric, paired: Measure | None, value: Measure) -> Judgement:
    """The word on one metric.

    ``within`` when the loss's bound is at most the margin and that of the value meets the floor; ``beyond`` when the
    loss's lower end is above the margin or the whole interval misses the floor; otherwise ``open``. An eval too small
    for its margin is judged by it all the same, and so stays open.

    Parameters
    ----------
    metric : Metric
    paired : Measure or None
        Variant minus baseline over the same items. None: the floor decides alone, and without a floor the word is
        ``open``.
    value : Measure
        The variant's own value.

    Returns
    -------
    Judgement
    """
    sign = 1 if metric.direction == "lower" else -1
    loss = None if paired is None else _Range.of(paired, sign).up_to(_bad_ends(metric, paired, sign))
    room = None if metric.floor is None else _Range.of(value, -sign, metric.floor)
    p, word, n = p_value(metric, paired, value), _word(metric.margin, loss, room), (paired or value).n
    few = word == "within" and p == NOT_INSIDE  # so few items that nothing bounds their mean
    word = "open" if few else word
    needed = FEWEST if few else _needed(metric.margin, loss, room, n, 1 if metric.rate else FEWEST)
    return Judgement(
        key=metric.key,
        word=word,
        margin=metric.margin if loss else None,
        loss=loss and loss.value,
        low=loss and loss.low,
        high=loss and loss.high,
        room=room and room.low,
        p=p if word == "within" else NOT_INSIDE,
        needed_n=needed if word == "open" else None,
    )


def beside(judgement: Judgement, metric: Metric, baseline: Measure | None) -> Judgement:
    """The same, unless the baseline itself is not shown to meet the floor: then it cannot tell what is lost.

    Who finds nothing has nothing to lose, so the word is never ``within``; and that the variant misses the floor is no
    fault of its own. A loss that is shown is ``beyond`` all the same.
    """
    if metric.floor is None or baseline is None:
        return judgement
    sign = 1 if metric.direction == "lower" else -1
    if _Range.of(baseline, -sign, metric.floor).low >= 0:
        return judgement
    lost = judgement.low is not None and is_beyond(judgement.low, judgement.margin)
    word = "beyond" if lost else "open"
    return judgement.model_copy(update={"word": word, "p": NOT_INSIDE, "needed_n": None, "untold": not lost})


def is_within(high, margin):
    """Whether the upper end of a loss fits into the margin; elementwise on arrays."""
    return high <= margin


def is_beyond(low, margin):
    """Whether the lower end of a loss is above the margin; elementwise on arrays."""
    return low > margin


def p_value(metric: Metric, paired: Measure | None, value: Measure) -> float:
    """The smallest of `LEVELS` at which the loss is inside its margin and the value above its floor.

    The larger of both p-values, as both have to hold, and `NOT_INSIDE` where not even the bounds at the first level are
    inside, or so few items have none.
    """
    sign = 1 if metric.direction == "lower" else -1
    worst = [] if paired is None else [[end - metric.margin for end in _bad_ends(metric, paired, sign)]]
    worst += [] if metric.floor is None else [[end - sign * metric.floor for end in _bad_ends(metric, value, sign)]]
    met = [sum(1 for _ in takewhile(lambda past: past <= 0, ends)) for ends in worst]
    deepest = min(met, default=0)
    return LEVELS[deepest - 1] if deepest else NOT_INSIDE


def _bad_ends(metric: Metric, measure: Measure, sign: int) -> list[float]:
    """The ends towards the worse, of which `sign` points up, at `LEVELS` as far as they are known."""
    if metric.rate:
        lows, highs = bounds_of(measure, LEVELS)
    else:
        lows, highs = measure.lows, measure.highs
    return [sign * float(end) for end in (highs if sign > 0 else lows)]


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

    def up_to(self, ends: Sequence[float]) -> _Range:
        """The same, up to the first of the ends towards the worse where that is farther."""
        return replace(self, high=max(self.high, *ends[:1])) if ends else self

    def scaled(self, factor: float) -> _Range:
        """Both sides shrunk by `factor`."""
        return _Range(
            self.value, self.value - factor * (self.value - self.low), self.value + factor * (self.high - self.value)
        )


def _word(margin: float, loss: _Range | None, room: _Range | None) -> Word:
    """`room` is the range of the value above its floor, so 0 is the floor."""
    if (loss and is_beyond(loss.low, margin)) or (room and room.high < 0):
        return "beyond"
    met = [is_within(loss.high, margin)] if loss else []
    met += [room.low >= 0] if room else []
    return "within" if met and all(met) else "open"


def _needed(margin: float, loss: _Range | None, room: _Range | None, n: int, fewest: int) -> int | None:
    """The fewest items after which the word is not open any more: one of those where some end meets some limit.

    No fewer than `fewest` where the word is then ``within``.
    """
    for items in sorted(_crossings(margin, loss, room, n)):
        shrink = math.sqrt(n / items)
        word = _word(margin, loss and loss.scaled(shrink), room and room.scaled(shrink))
        if word != "open":
            return max(items, fewest) if word == "within" else items
    return None


def _crossings(margin: float, loss: _Range | None, room: _Range | None, n: int) -> set[int]:
    """Where an end of an interval passes the margin or the floor."""
    found = []
    if loss:
        found += [_items(loss.high - loss.value, margin - loss.value, n)]
        found += [_items(loss.value - loss.low, loss.value - margin, n)]
    if room:
        found += [_items(room.value - room.low, room.value, n), _items(room.high - room.value, -room.value, n)]
    return {items for items in found if items is not None}


def _items(width: float, distance: float, n: int) -> int | None:
    """`windows_needed`, which knows no largest number; None where it would be one that nobody can measure."""
    return windows_needed(width, distance, n) if abs(width) < OUT_OF_REACH * distance else None

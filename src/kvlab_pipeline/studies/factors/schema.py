"""The parts ``gap`` and ``factors`` of ``metrics.json``: a difference between two corners, divided among factors."""

from __future__ import annotations

from typing import Literal

from kvlab.core.recipe import DType, Engine, Protocol
from kvlab_pipeline.studies.entries import Compared, Entry, Interval

Measure = Literal["kl", "delta_nll"]
"""KL to the same engine without a codec, or the change of the log loss; both in nats per token."""


class Corner(Entry):
    """One combination of the factors' levels."""

    engine: Engine
    protocol: Protocol
    dtype: DType
    variance_ratio: float
    origin: Engine
    """The engine on whose capture everything fitted was fitted."""


class MeasuredCorner(Corner):
    """A corner and what its cell costs."""

    value: Interval


class Part(Entry):
    """A factor's share of the gap: its Shapley value."""

    factor: str
    share: Interval
    windows_needed: int | None
    """At which this share would stand clear of zero, were it what it is here; null where nothing is to be seen."""


class Interaction(Entry):
    """What two factors do together beyond what each does alone."""

    factors: tuple[str, str]
    effect: Interval


class Decomposed(Entry):
    """The gap in one measure; the shares add up to it exactly."""

    low: Interval
    high: Interval
    gap: Interval
    parts: tuple[Part, ...]
    interactions: tuple[Interaction, ...]
    corners: tuple[MeasuredCorner, ...]


class Decomposition(Entry):
    """The gap between the corner where all factors are low and the one where all are high."""

    factors: tuple[str, ...]
    """Those that vary; the other levels of a corner are shared."""
    dtype: DType | None
    stream: Literal["kv"]
    low: Corner
    high: Corner
    measures: dict[Measure, Decomposed]
    compared: Compared
    """The cell of the high corner, and that of the low one."""


class OnText(Entry):
    """The gap between the published corners on the windows of one text, in KL; its shares add up to it."""

    text: Literal["test", "other"]
    """`test` is held out of the text that calibrates, `other` is of another domain."""
    source: str
    factors: tuple[str, ...]
    low: Interval
    high: Interval
    gap: Interval
    parts: tuple[Part, ...]
    compared: Compared


class ByWindow(Entry):
    """KL of every corner, window by window, of which another model's differences are made."""

    key: str
    """Digest of every window and position; equal keys are equal tokens."""
    windows: tuple[int, ...]
    counts: tuple[float, ...]
    sums: tuple[tuple[float, ...], ...]
    """By corner, and there by window, in nats."""
    n_tokens: int
    documents: tuple[int, ...] | None
    """The document of each window, where that is known."""


class Gap(Decomposition):
    """The decomposition between the two published corners."""

    windows: ByWindow

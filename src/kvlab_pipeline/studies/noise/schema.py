"""The parts ``noise``, ``noise_slope``, ``closure`` and ``structure`` of ``metrics.json``."""

from __future__ import annotations

from typing import Literal

from kvlab.core.recipe import DType, Engine, Protocol, Stream
from kvlab_pipeline.studies.entries import Compared, Entry, Interval

Group = Literal["all", "coded", "boundary"]


class NoiseEntry(Entry):
    """Net KL of Gaussian noise in the codec's place, in nats per token."""

    engine: Engine
    stream: Stream
    group: Group
    protocol: Protocol
    sigma: float
    """Over the root mean square of K or V."""
    kl: Interval


class SlopeEntry(Entry):
    """How KL grows with the noise, over the range where a power law holds; null where there is no such range."""

    engine: Engine
    stream: Stream
    group: Group
    slope: Interval | None
    range: tuple[float, float] | None
    points: int
    coefficient: Interval | None
    """c of KL = c sigma squared."""


class ClosureEntry(Entry):
    """A dtype's KL, predicted from the noise curves and measured."""

    engine: Engine
    stream: Stream
    against: str
    """cast: K, V or both of a float32 engine, rounded; else a baseline run of the engine in that dtype."""
    dtype: DType
    sigma: float
    in_range: bool
    predicted: Interval
    measured: Interval
    ratio: Interval | None
    factor: float
    reading: Literal["closes", "open", "does not close"] | None
    share: Interval | None
    """Of a run's KL, what rounding K and V is predicted to cause."""
    cast_share: Interval | None
    """Of a run's KL, what rounding K and V was measured to cause."""
    compared: Compared | None


class StructureEntry(Entry):
    """The codec's KL, and that of an error of the same size and random direction."""

    engine: Engine
    stream: Stream
    codec: Interval
    isotropic: Interval
    ratio: Interval | None
    compared: Compared

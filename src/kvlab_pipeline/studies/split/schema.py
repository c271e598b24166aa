"""The part ``split`` of ``metrics.json``."""

from __future__ import annotations

from kvlab.core.recipe import Engine, Protocol
from kvlab_pipeline.studies.entries import Compared, Entry, Interval


class SplitEntry(Entry):
    """One division of a codec's bits between K and V, in nats per token."""

    engine: Engine
    protocol: Protocol
    codec: str
    k_bits: int
    v_bits: int
    cell_id: str
    bits_per_value: float
    kl: Interval
    """Net of the identity cell's."""
    difference: Interval | None
    """Its KL minus that of the most even division; null for that one."""
    compared: Compared | None

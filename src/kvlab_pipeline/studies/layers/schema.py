"""The parts ``layers`` and ``additivity`` of ``metrics.json``: single layers, and whether their costs add up."""

from __future__ import annotations

from typing import Annotated, Literal

from kvlab.core.recipe import Engine, Protocol, Stream
from kvlab_pipeline.studies.entries import Compared, Entry, Interval, PValue


class LayerEntry(Entry):
    """What coding one layer's K, V or both costs, net of the identity cell."""

    engine: Engine
    protocol: Protocol
    stream: Stream
    kind: Literal["only", "but"]
    """only: this layer and nothing else is coded; but: all layers, minus all layers without this one."""
    layer: int
    boundary: bool
    label: str
    cell_id: str
    kl: Interval
    p_value: Annotated[float, PValue]
    q_value: Annotated[float, PValue]
    """Corrected for the layers of one engine, protocol, stream and kind (Benjamini and Hochberg)."""
    q_stands_out: Annotated[float, PValue] | None
    """Of the layer's cost against the mean over layers; null where there is one layer."""
    bits_per_value: float


class AdditivityEntry(Entry):
    """What is coded together against the sum of its parts, net KL in nats per token."""

    engine: Engine
    protocol: Protocol
    stream: Stream
    parts: Literal["layers", "streams"]
    joint: Interval
    sum: Interval
    ratio: Interval | None
    """Joint over sum; null where the sum cannot be told from zero."""
    interaction: Interval
    """Joint minus sum."""
    left_out_sum: Interval | None
    boundary_excess: Interval | None
    """What a boundary layer costs alone minus what another layer does."""
    compared: Compared
    """All together, and each part alone."""

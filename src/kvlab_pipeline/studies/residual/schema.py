"""The part ``residual`` of ``metrics.json``: the codec's own error on each engine's capture. No model runs."""

from __future__ import annotations

from typing import Annotated, Literal

from kvlab.core.recipe import Engine
from kvlab_pipeline.studies.entries import Entry, Interval, PValue


class Place(Entry):
    """Which recipe, stream, and layer or group of layers."""

    variance_ratio: float
    stream: Literal["k", "v"]
    group: Literal["layer", "coded", "all"]
    layer: int | None
    """Null for a group of layers."""
    boundary: bool | None


class RankShare(Entry):
    """How many blocks kept a rank, and which part of all blocks they are."""

    d_eff: int
    blocks: int
    share: Interval


class ErrorEntry(Place):
    """Relative squared errors, ranks, outliers and bytes on one engine's capture."""

    engine: Engine
    recipe_id: str
    raw_error: Interval
    whitened_error: Interval | None
    d_eff: Interval
    outlier_rate: Interval | None
    bits_per_value: Interval
    frame_bytes: Interval
    d_eff_blocks: dict[str, int]
    d_eff_shares: tuple[RankShare, ...] | None


class RatioEntry(Place):
    """The squared error on vLLM's capture over that on transformers', paired by window."""

    measure: Literal["raw", "whitened"]
    ratio: Interval | None
    p_value: Annotated[float, PValue] | None
    q_value: Annotated[float, PValue] | None
    resolved: bool
    windows_needed: int | None


class Residual(Entry):
    """Errors by layer, and the engines' against each other."""

    origin: Engine
    engines: tuple[Engine, ...]
    windows: int
    context: int
    boundary_layers: tuple[int, ...]
    recipes: dict[str, float]
    """Recipe id -> variance ratio."""
    rows: tuple[ErrorEntry, ...]
    ratios: tuple[RatioEntry, ...]

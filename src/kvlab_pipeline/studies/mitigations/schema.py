"""The part ``mitigations`` of ``metrics.json``: ways to spend bytes beside uniform spending of as many."""

from __future__ import annotations

from typing import Literal

from kvlab.core.recipe import DType, Engine, Protocol
from kvlab_pipeline.studies.entries import Compared, Entry, Interval


class SearchStep(Entry):
    """What the calibration split shows for some favoured layers."""

    layers: tuple[int, ...]
    kl: float
    bits_per_value: float


class Chosen(Entry):
    """Which layers each arm favours, and how that was found on the calibration split."""

    engine: Engine
    dtype: DType
    protocol: Protocol
    windows: int
    budget: float
    """Bits per value that uncoded layers were allowed to bring the whole cache to."""
    search_id: str
    layers: dict[str, tuple[int, ...]]
    searches: dict[str, tuple[SearchStep, ...]]


class ArmEntry(Entry):
    """What an arm costs on the test split."""

    engine: Engine
    protocol: Protocol
    arm: str
    cell_id: str
    layers: tuple[int, ...]
    bits_per_value: float
    kl: Interval
    kl_net: Interval
    delta_nll: Interval


class Comparison(Entry):
    """An arm against uniform spending of as many bytes."""

    engine: Engine
    protocol: Protocol
    arm: str
    layers: tuple[int, ...]
    against: str
    beyond: Literal["above", "below"] | None
    """Where the arm takes more or fewer bytes than any uniform spending that was measured."""
    same: bool
    """Whether both are one cell."""
    bits_per_value: float
    against_bits_per_value: float
    difference: Interval
    """Nats per token."""
    log_ratio: Interval
    ratio: Interval
    windows_needed: int | None
    compared: Compared


class Generalised(Entry):
    """By how much an arm lowers KL on the split that chose it, and on the test split."""

    arm: str
    layers: tuple[int, ...]
    calib: float
    test: Interval | None


class Mitigations(Entry):
    """The choice, the arms, their comparisons, and how the choice carries over."""

    choice: Chosen
    arms: tuple[ArmEntry, ...]
    comparisons: tuple[Comparison, ...]
    generalises: tuple[Generalised, ...]

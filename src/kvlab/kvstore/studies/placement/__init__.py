"""Whether it matters in which block of the pool a chunk lies. Torch is loaded by `measure` alone."""

from __future__ import annotations

from pathlib import Path

from kvlab.kvstore.studies.placement.record import PlacementRecord, read
from kvlab.kvstore.studies.placement.tables import ABOUT, TITLE, tables
from kvlab.params import Params

__all__ = ["ABOUT", "TITLE", "PlacementRecord", "measure", "read", "tables"]


def measure(params: Params, windows_path: Path, out: Path) -> None:
    """See `measuring.measure`."""
    from kvlab.kvstore.studies.placement import measuring

    measuring.measure(params, windows_path, out)

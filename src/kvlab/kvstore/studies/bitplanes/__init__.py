"""How well a few bits of each key say which tokens attention will look at. Torch is loaded by `measure` alone."""

from __future__ import annotations

from pathlib import Path

from kvlab.kvstore.studies.bitplanes.record import BitplanesRecord, read
from kvlab.kvstore.studies.bitplanes.tables import ABOUT, TITLE, tables
from kvlab.params import Params

__all__ = ["ABOUT", "TITLE", "BitplanesRecord", "measure", "read", "tables"]


def measure(params: Params, windows_path: Path, out: Path) -> None:
    """See `measuring.measure`."""
    from kvlab.kvstore.studies.bitplanes import measuring

    measuring.measure(params, windows_path, out)

"""Which chunks a bounded pool should keep. Torch is loaded by `measure` alone."""

from __future__ import annotations

from pathlib import Path

from kvlab.kvstore.studies.policy.record import PolicyRecord, read
from kvlab.kvstore.studies.policy.tables import ABOUT, TITLE, tables
from kvlab.params import Params

__all__ = ["ABOUT", "TITLE", "PolicyRecord", "measure", "read", "tables"]


def measure(params: Params, needles_path: Path, out: Path) -> None:
    """See `measuring.measure`."""
    from kvlab.kvstore.studies.policy import measuring

    measuring.measure(params, needles_path, out)

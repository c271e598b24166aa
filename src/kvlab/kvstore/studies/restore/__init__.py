"""What a restore from a snapshot saves, what it costs, and whether it can be told from a cold run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.kvstore.studies.restore.promises import unmet
from kvlab.kvstore.studies.restore.record import RestoreRecord, Settings, read
from kvlab.kvstore.studies.restore.tables import ABOUT, TITLE, tables

if TYPE_CHECKING:
    from kvlab.calibration.load import Fitted
    from kvlab.params import Params

__all__ = ["ABOUT", "TITLE", "RestoreRecord", "Settings", "measure", "read", "tables", "unmet"]


def measure(params: Params, windows_path: Path, fitted: Fitted | None, out: Path) -> None:
    """Measure what `params.kvstore.restore` asks for, see `study.measure`; torch is loaded here and not before."""
    from kvlab.kvstore.studies.restore import study

    study.measure(params, Settings.of(params), windows_path, fitted, out)

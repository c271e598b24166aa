"""What was measured of a row's quality, and what may be concluded from it."""

from kvlab.gate.evidence.derived import Derived, Status, status
from kvlab.gate.evidence.faults import BASELINE_RECIPE, problems
from kvlab.gate.evidence.measures import ALPHA, Measure, measured, paired
from kvlab.gate.evidence.record import (
    UNOBSERVED,
    Evidence,
    EvidenceError,
    Imported,
    Observed,
    build,
    parse,
    read,
    well_formed,
)

__all__ = [
    "ALPHA",
    "BASELINE_RECIPE",
    "UNOBSERVED",
    "Derived",
    "Evidence",
    "EvidenceError",
    "Imported",
    "Measure",
    "Observed",
    "Status",
    "build",
    "measured",
    "paired",
    "parse",
    "problems",
    "read",
    "status",
    "well_formed",
]

"""What rows were made of, item by item, where a page needs more than a row holds: times, and the baseline repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvlab.gate.evidence.measures import BOOTSTRAP
from kvlab.stats.bootstrap import Column, Estimate
from kvlab_pipeline.gate_page.measured_rows import RATES, row_identity, scores_of
from kvlab_pipeline.studies.mechanisms.plan import BASELINE
from kvlab_pipeline.studies.mechanisms.records import MechanismRow, MechanismsRecord, read_mechanisms


class Repeat(NamedTuple):
    """One metric of the engine as it is: scored a second time, and the first, float64 [items]."""

    quality_eval_id: str
    metric: str
    rate: bool
    second: np.ndarray
    first: np.ndarray


class Sampled(NamedTuple):
    """What one row was made of.

    Parameters
    ----------
    seconds : tuple of float
        What the pass of each scored window took, in the order of the windows, which every row of an engine shares.
    repeats : tuple of Repeat
        Of a baseline; of other rows none.
    """

    seconds: tuple[float, ...]
    repeats: tuple[Repeat, ...] = ()


Samples = dict[tuple, Sampled]
"""By run and `row_id`."""


def read(records: Iterable[Path]) -> Samples:
    """The samples of all rows of some records.

    Raises
    ------
    StorageError
        As `kvlab_pipeline.gate_page.measured_rows.write`.
    """
    found: Samples = {}
    for path in records:
        record, scores = read_mechanisms(path)
        for row in record.rows:
            named = row_identity(record, row.label)
            found[named["run"], named["row_id"]] = Sampled(row.seconds, tuple(_repeats(record, row, scores)))
    return found


def _repeats(record: MechanismsRecord, row: MechanismRow, scores) -> Iterable[Repeat]:
    for run in row.evals if row.mechanism == BASELINE else ():
        for metric, (second, first) in scores_of(record, row, run, scores).items():
            yield Repeat(run.quality_eval_id, metric, RATES[run.quality_eval_id], second, first)


def speed(own: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """How many times as fast as `other`: its mean seconds over one's own, paired by window.

    Passes of all rows take turns on each window, so what slows the machine for a while slows them alike.

    Returns
    -------
    Estimate or None
        None where the times are not of the same windows, or of fewer than two.
    """
    if len(own) != len(other) or len(own) < 2:
        return None
    windows = np.arange(len(own))
    mine, others = (Column.of(windows, np.zeros_like(windows), np.asarray(seconds)) for seconds in (own, other))
    return BOOTSTRAP.ratio(others, mine)

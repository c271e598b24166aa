"""What a study brings to the report: its part of ``metrics.json``, its claims, its figures, its sections of the page.

A study's folder says so in a file ``chapter.py``, as ``CHAPTER``. Nothing else names it: `register.chapters` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.studies.measured import Results


@dataclass(frozen=True)
class Sources:
    """The files that metrics are made of.

    Parameters
    ----------
    baseline, jobs : sequence of Path
        JSON records of ``kvlab step baseline`` and ``kvlab step measure``, each with its parquet beside it.
    codebooks : sequence of Path
        JSON of ``kvlab step codebooks``, one per origin.
    sigmas : sequence of Path
        JSON sidecars of ``kvlab step sigma``, one per engine.
    residual : sequence of Path
        JSON records of ``kvlab step residual``, one per engine, each with its parquet beside it.
    choice : Path or None
        JSON of ``kvlab step choose``; None where the mitigations are not measured.
    ladder : Path or None
        JSON of ``kvlab step ladder``; None where the ladder is not asked for.
    further : Path or None
        JSON of ``kvlab step ladder_further``; None where neither `ladder.growth` nor `ladder.contexts` asks for it.
    """

    baseline: Sequence[Path]
    jobs: Sequence[Path]
    codebooks: Sequence[Path]
    sigmas: Sequence[Path]
    residual: Sequence[Path]
    choice: Path | None
    ladder: Path | None = None
    further: Path | None = None


@dataclass(frozen=True)
class ChapterInputs:
    """What numbers are made of: the parameters, the tables of all cells and runs, one bootstrap for all, the files."""

    params: Params
    results: Results
    boot: Bootstrap
    sources: Sources


@dataclass(frozen=True)
class PageSection:
    """A section of FINDINGS.md; its template is ``NAME.md.j2`` in the study's folder.

    Parameters
    ----------
    place : int
        Sections stand in the order of this number.
    folded : str
        What the page says of the part that it folds away.
    asks : str or None
        What its claims are about, in words; None for a section that makes none.
    """

    place: int
    folded: str
    asks: str | None = None


@dataclass(frozen=True)
class Drawn:
    """A figure: what takes its table out of ``metrics.json``, and what says how that table is drawn.

    Parameters
    ----------
    table : callable
        ``metrics -> polars.DataFrame``, one row per drawn number; None or empty when there is nothing.
    describe : callable
        ``table -> kvlab_pipeline.rendering.figure.Figure``, a mark for each row.
    """

    table: Callable[[dict], pl.DataFrame | None]
    describe: Callable[[pl.DataFrame], Figure]


def _nothing(*_given) -> list:
    return []


@dataclass(frozen=True)
class Chapter:
    """One study in the report. What it is handed as `metrics` may lack a part: not measured, or withheld.

    Parameters
    ----------
    parts : dict of str to Several, By, Single or Sentences
        Its parts of ``metrics.json``, see `studies.tidy`.
    entries : callable
        `ChapterInputs` -> those parts.
    sections : dict of str to PageSection
        By the name of the template.
    context : callable
        ``(metrics, basis) -> dict``: what its templates name, as text ready to print.
    claims : callable
        ``metrics -> list of dict``, see `studies.estimates.claim`.
    figures : dict of str to Drawn
    limits : callable
        ``metrics -> list of (what, estimates)``: the effects whose resolution the page tells.
    """

    parts: dict[str, Any]
    entries: Callable[[ChapterInputs], dict]
    sections: dict[str, PageSection]
    context: Callable[[dict, Basis], dict]
    claims: Callable[[dict], list[dict]] = _nothing
    figures: dict[str, Drawn] = field(default_factory=dict)
    limits: Callable[[dict], list[tuple[str, list[dict]]]] = _nothing


def estimates_of(metrics: dict, part: str, key: str) -> list[dict]:
    """The estimates of a part that is a list of rows; those that are None are left out."""
    return [row[key] for row in metrics.get(part) or [] if row[key]]

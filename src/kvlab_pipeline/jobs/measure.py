"""One process that measures: engines, windows and what parts of a study want scored on them, in a single walk.

A part is what one study contributes: its subjects, the windows that they want, and what it writes of what was found.
The clean pass of a window is made once for all of them, a coded tensor once for all cells of equal recipe, and each
engine is started once, or not at all where nothing is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

import polars as pl
import torch

from kvlab.calibration import load as calibration
from kvlab.calibration.load import Calibrated, FittedFiles
from kvlab.calibration.needs import needs_calibration
from kvlab.core import code, memory
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.recipe import Cell
from kvlab.core.records import CellRecord, JobRecord, Provenance, versions, write_job
from kvlab.core.testimony import Testimony
from kvlab.engines.capability import check_protocol
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.engines import Engines, Visit, Which, device
from kvlab.measure.loop import Subject, walk
from kvlab.measure.store import Found, ResultStore
from kvlab.measure.subjects import CellSubject, Memos, Probe, probed, probes_of, table_of
from kvlab.measure.windows import Window, windows_for
from kvlab.measure.witnessing import WitnessSubject, chosen, witnessed_of
from kvlab.text import corpus
from kvlab.witness.plain import PlainModel
from kvlab_pipeline.jobs import plan

Findings = dict[int, list[tuple[Window, Found]]]
"""What was found of each subject, by its id in this process, window by window."""
Probes = dict[tuple[Which, str, str], Probe]
"""What the ways to a codec do by themselves, by engine, protocol and placement."""


@dataclass
class Lab:
    """What all parts of a job share.

    Parameters
    ----------
    windows : TokenWindows
    calibrated : dict of str to Calibrated
        By origin; empty where no codec needs one.
    """

    params: Params
    info: ModelInfo
    windows: corpus.TokenWindows
    calibrated: dict[str, Calibrated]
    engines: Engines
    store: ResultStore
    windows_path: Path
    memos: Memos = field(default_factory=Memos)
    _plain: PlainModel | None = None

    @classmethod
    def open(
        cls,
        params: Params,
        windows_path: Path,
        fitted: dict[str, FittedFiles],
        folder: Path | None = None,
        longest: int = 0,
    ) -> Lab:
        """Read what is measured on; no engine is started yet.

        Parameters
        ----------
        folder : Path, optional
            The store of what was measured before; without one everything is measured.
        longest : int
            Tokens of the longest window beside those of `windows_path`.
        """
        torch.set_num_threads(params.jobs.threads)
        memory.keep_freed()
        info = resolve(params.model)
        windows = corpus.load(windows_path, info.model_hash)
        own = (info.model_hash, windows.corpus_hash, info)
        calibrated = {origin: calibration.load(files, *own) for origin, files in fitted.items()}
        engines = Engines(info, max_tokens=max(windows.test.shape[1], longest))
        store = ResultStore(folder, engines.identity(), code.state if folder else None)
        return cls(params, info, windows, calibrated, engines, store, Path(windows_path))

    def visit(self, window: Window) -> Visit:
        """Begin a window: what was coded on the last one is forgotten."""
        self.memos.clear()
        memory.give_back()
        return self.engines.visit(window)

    def subject(self, cell: Cell) -> CellSubject:
        """A cell at work."""
        check_protocol(cell.engine, cell.protocol)
        calibrated = calibrated_for(cell, self.calibrated)
        memo = self.memos.get(Which.of_cell(cell))
        return CellSubject(cell, coder_of(cell, calibrated, memo), calibrated)

    def witnesses(
        self, subjects: Sequence[CellSubject], windows: Sequence[Window], judged: bool = True
    ) -> list[WitnessSubject]:
        """Those that compute some of these cells again; `judged` as the cells' own coders are."""
        found = []
        for subject in chosen(subjects):
            if due := [window for window in windows if subject.due(window)]:
                coder = coder_of(subject.cell, subject.calibrated, self.memos.get(subject.which), judged)
                found.append(WitnessSubject(coder, due[-1], self.plain, self.windows_path))
        return found

    def plain(self) -> PlainModel:
        """The witness's model, loaded when it is first asked for."""
        if self._plain is None:
            self._plain = PlainModel(self.info.path)
        return self._plain

    def provenance(self, origins: Iterable[str]) -> Provenance:
        """What the numbers of a part were measured on; `origins` are those of the calibrations that it reads."""
        chosen = {o: one for o, one in self.calibrated.items() if o in set(origins)}
        return provenance(self.info, self.windows, chosen)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_exception) -> None:
        self.engines.close()


def provenance(info: ModelInfo, windows: corpus.TokenWindows, calibrated: dict[str, Calibrated]) -> Provenance:
    """What numbers were measured on, here."""
    return Provenance(
        model=info.slug,
        model_hash=info.model_hash,
        corpus_hash=windows.corpus_hash,
        calibration={origin: one.sigma_hash for origin, one in sorted(calibrated.items())},
        versions=versions(),
        device=device(),
    )


class JobPart(Protocol):
    """What one study contributes to a job.

    Attributes
    ----------
    subjects : sequence of Subject
    windows : sequence of Window
    cells : sequence of Cell
        Whose engines, protocols and placements are probed: with one bit, and with what changes nothing.
    witnesses : sequence of WitnessSubject
        What computes some of the cells again.
    """

    subjects: Sequence[Subject]
    windows: Sequence[Window]
    cells: Sequence[Cell]
    witnesses: Sequence[WitnessSubject]

    def finish(self, findings: Findings, probes: Probes) -> None:
        """Write what was found."""


def run(lab: Lab, parts: Sequence[JobPart], title: str) -> None:
    """Measure all parts in one walk over their windows, and have each write what was found of it.

    Raises
    ------
    CodecNotActive
        A codec fired less often than it should have, or a one-bit codec leaves the logits alone.
    Fault
        A codec that changes nothing moves the logits.
    WitnessDisagrees
        A second computation of a cell comes to something else.
    NonFinite
        Logits or coded tensors hold NaN or infinity.
    """
    windows = list(dict.fromkeys(window for part in parts for window in part.windows))
    probing = probes_of((cell for part in parts for cell in part.cells), windows[0]) if windows else []
    scored = [one for part in parts for one in (*part.subjects, *part.witnesses)]
    began = perf_counter()
    findings = measured(lab, windows, [*probing, *scored], title)
    tell_cost([one for part in parts for one in part.witnesses], perf_counter() - began)
    values = probed((probe, findings[id(probe)][0][1]) for probe in probing)
    for part in parts:
        part.finish(findings, values)


def tell_cost(witnesses: Sequence[WitnessSubject], seconds: float) -> None:
    """Say in the job's log what witnesses took of all that was measured."""
    took = sum(one.seconds for one in witnesses)
    if took:
        print(
            f"witnesses of {len(witnesses)} cells: {took:.1f} of {seconds:.1f} s, {took / seconds:.1%}", file=sys.stderr
        )


def measured(lab: Lab, windows: Sequence[Window], subjects: Sequence[Subject], title: str) -> Findings:
    """`walk` with the lab's store, its findings sorted by subject."""
    findings: Findings = {id(subject): [] for subject in subjects}
    for window, found in walk(windows, subjects, lab.visit, lab.store, title):
        for subject, one in found:
            findings[id(subject)].append((window, one))
    return findings


# ------------------------------------------------------------------------------------------- cells of studies


@dataclass
class CellsPart:
    """The cells of one job of a study, which become its ``.parquet`` and ``.json``."""

    lab: Lab
    study: str
    cells: list[Cell]
    out: Path

    def __post_init__(self):
        self.subjects = [self.lab.subject(cell) for cell in self.cells]
        self.windows = windows_for(self.cells, self.lab.windows)
        self.witnesses = self.lab.witnesses(self.subjects, self.windows)

    def finish(self, findings: Findings, probes: Probes) -> None:
        """See `JobPart.finish`; rows are in the order of the windows."""
        lab, windows = self.lab, self.lab.windows
        record = JobRecord(
            provenance=lab.provenance(plan.origins(lab.params, self.study)),
            context=windows.context,
            eval=windows.eval,
            cells=tuple(cell_record(lab, one, findings[id(one)], probes) for one in self.subjects),
            documents=windows.documents,
            witnessed=tuple(self._testimony(one, findings) for one in self.witnesses),
        )
        by_window: dict[Window, list[pl.DataFrame]] = {window: [] for window in self.windows}
        for subject in self.subjects:
            for window, found in findings[id(subject)]:
                by_window[window].append(table_of(subject.cell.cell_id, window, found))
        write_job(self.out, record, pl.concat([table for tables in by_window.values() for table in tables]))

    def _testimony(self, witness: WitnessSubject, findings: Findings) -> Testimony:
        """What was witnessed of one cell, if that is what is written of it."""
        ((window, seen),) = findings[id(witness)]
        written = next(one for one in self.subjects if one.cell == witness.cell)
        return witnessed_of(seen, witness.cell, dict(findings[id(written)])[window].rows)


def cell_record(lab: Lab, subject: CellSubject, found: list[tuple[Window, Found]], probes: Probes) -> CellRecord:
    """The record of a measured cell."""
    cell, windows = subject.cell, lab.windows
    probe = probes[subject.which, cell.protocol, cell.placement] if cell.layers else Probe(None, None)
    tokens = windows.context if cell.span == "context" else windows.context + windows.eval
    return CellRecord(
        cell_id=cell.cell_id,
        recipe_id=cell.recipe_id,
        cell=cell,
        coding=subject.coding([one.note for _, one in found], lab.info, tokens),
        canary_kl=probe.canary,
        floor_kl=probe.floor,
        fitted=subject.coder.fitted(),
    )


def calibrated_for(cell: Cell, calibrated: dict[str, Calibrated]) -> Calibrated | None:
    """The calibration that a cell is to be coded with.

    Raises
    ------
    CalibrationMismatch
        A codec needs a calibration of another origin than there are.
    """
    needy = any(needs_calibration(stream) for recipe in cell.recipes for stream in (recipe.k, recipe.v))
    if needy and calibrated and cell.origin not in calibrated:
        raise CalibrationMismatch(
            f"cell {cell.label!r} is calibrated on {cell.origin}; given are only: {', '.join(calibrated)};"
            " name its files with --sigma and --codebooks too"
        )
    return calibrated.get(cell.origin)


def measure(
    params: Params,
    study: str,
    job: str,
    windows_path: Path,
    fitted: dict[str, FittedFiles],
    out: Path,
    choice: Frozen | None = None,
    folder: Path | None = None,
) -> None:
    """Measure the cells of one job of a study and write its ``.parquet`` and ``.json``.

    Parameters
    ----------
    fitted : dict of str to FittedFiles
        The calibrations by origin; empty where no codec needs one.
    choice : kvlab_pipeline.studies.mitigations.plan.LayerChoice, optional
        What the mitigations are planned from.
    folder : Path, optional
        See `Lab.open`.

    Raises
    ------
    CalibrationMismatch
        A cell is calibrated on an engine's capture of which no calibration was given.
    CodecNotActive, NonFinite
        See `run`.
    """
    cells = plan.job_cells(params, study, job, choice)
    with Lab.open(params, windows_path, fitted, folder) as lab:
        run(lab, [CellsPart(lab, study, cells, out)], f"{study} {job}")

"""One job: load an engine once and measure a batch of cells on it, window by window."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import torch
from tqdm import tqdm

from kvlab import corpus
from kvlab.calibration import load as calibration
from kvlab.calibration.load import Calibrated, Fitted
from kvlab.engines.base import Engine
from kvlab.engines.capability import check_protocol
from kvlab.engines.registry import start
from kvlab.errors import CodecNotActive
from kvlab.experiments.coding import STREAMS, Coder
from kvlab.experiments.plan import job_cells
from kvlab.experiments.scoring import WindowRun, canary_kl
from kvlab.model import resolve
from kvlab.params import Params
from kvlab.recipe import Cell
from kvlab.records import CANARY_MIN, CellRecord, JobRecord, Provenance, versions, write_job


def measure(
    params: Params,
    study: str,
    job: str,
    windows_path: Path,
    fitted: Fitted | None,
    out: Path,
) -> None:
    """Measure the cells of one job and write its ``.parquet`` and ``.json``.

    `fitted` is None where no codec needs a calibration. The clean pass of a window is made once and
    serves every cell. Memory is one window's logits.

    Raises
    ------
    CodecNotActive
        A codec fired less often than it should have, or a one-bit codec leaves the logits alone.
    NonFinite
        Logits or coded tensors hold NaN or infinity.
    """
    torch.set_num_threads(params.jobs.threads)
    cells = job_cells(params, study, job)
    info = resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    calibrated = calibration.load(fitted, info.model_hash, windows.corpus_hash) if fitted else None
    for cell in cells:
        check_protocol(cell.engine, cell.protocol)
    engine = start(cells[0].engine, info, cells[0].dtype, max_tokens=windows.test.shape[1])
    memo: dict = {}
    coders = {cell.cell_id: Coder(cell, calibrated, memo) for cell in cells}
    tables, canaries = [], {}
    for due, number, ids in tqdm(scored(cells, windows), desc=f"{study} {job}", unit="window"):
        run = WindowRun(engine, ids, windows.context, number)
        if not canaries:
            canaries = check_canaries(run, cells)
        memo.clear()
        tables += [run.rows(cell.cell_id, run.logits(cell, coders[cell.cell_id])) for cell in due]
    record = JobRecord(
        provenance=provenance(engine, windows, calibrated),
        context=windows.context,
        eval=windows.eval,
        cells=tuple(cell_record(cell, coders[cell.cell_id], canaries, windows.context, info) for cell in cells),
    )
    write_job(out, record, pl.concat(tables))
    engine.close()


def scored(cells: list[Cell], windows: corpus.TokenWindows) -> list[tuple[list[Cell], int, list[int]]]:
    """(cells that score it, its number, its ids) of each window of each text that is needed."""
    todo = []
    for text in dict.fromkeys(cell.text for cell in cells):
        for number, ids in enumerate(windows.scored(text).tolist()):
            due = [cell for cell in cells if cell.text == text and number < cell.windows]
            todo += [(due, number, ids)] if due else []
    return todo


def check_canaries(run: WindowRun, cells: list[Cell]) -> dict[str, float]:
    """One-bit KL of every protocol in use, of K or of V alone, whichever is smaller.

    Refused when either does not move the logits: together they would hide that one hook is dead.
    """
    found = {}
    for protocol in sorted({cell.protocol for cell in cells}):
        by_stream = {stream: canary_kl(run, protocol, stream) for stream in STREAMS}
        for stream, kl in by_stream.items():
            if kl < CANARY_MIN:
                raise CodecNotActive(
                    f"a one-bit codec on {stream.upper()} moves the logits of {run.engine.name} ({protocol}) by KL"
                    f" {kl:.1e} nats only; the hook does not reach the attention"
                )
        found[protocol] = min(by_stream.values())
    return found


def provenance(engine: Engine, windows: corpus.TokenWindows, calibrated: Calibrated | None) -> Provenance:
    """What this job's numbers were measured on."""
    return Provenance(
        model_hash=engine.info.model_hash,
        corpus_hash=windows.corpus_hash,
        calibration_hash=calibrated.calibration_hash if calibrated else None,
        versions=versions(),
        device=engine.device,
    )


def cell_record(cell: Cell, coder: Coder, canaries: dict[str, float], context: int, info) -> CellRecord:
    """The record of a measured cell."""
    return CellRecord(
        cell_id=cell.cell_id,
        recipe_id=cell.recipe_id,
        cell=cell,
        coding=coder.coding(info, context, cell.dtype),
        canary_kl=canaries[cell.protocol] if cell.layers else None,
    )

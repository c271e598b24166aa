"""Save, restore and compare on a real model, and write what was found."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from kvlab.calibration import load as calibration
from kvlab.calibration.load import FittedFiles
from kvlab.core.errors import ParamsError
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.records import Provenance, forget, machine, versions, write_json
from kvlab.kvstore.hf.model import PagedModel
from kvlab.text import corpus
from kvlab_pipeline.studies.restore.identity import agreements, evicted
from kvlab_pipeline.studies.restore.prompts import joined, pool_of, shared_tokens, snapshot_of
from kvlab_pipeline.studies.restore.record import Harness, RestoreRecord, RestoreSettings, RunAgreement
from kvlab_pipeline.studies.restore.runner import PagedAttempt, conduct
from kvlab_pipeline.studies.restore.speed import speeds
from kvlab_pipeline.studies.restore.stored import stored

DTYPE, LOW_DTYPE = "float32", "bfloat16"


def measure(
    params: Params, settings: RestoreSettings, windows_path: Path, fitted: FittedFiles | None, out: Path
) -> None:
    """Measure everything that RESTORE.md says.

    Parameters
    ----------
    fitted : FittedFiles or None
        The calibration. Without one the codecs that need it are left out, and the record says so.

    Raises
    ------
    ParamsError
        A prompt is longer than the windows together, or than the model has positions for.
    CapabilityError
        The model cannot be paged.
    CalibrationMismatch
        A calibration is another model's or another corpus's, or lacks what a codec reads.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    calibrated = calibration.load(fitted, info.model_hash, windows.corpus_hash, info) if fitted else None
    rows = windows.test.tolist()
    refuse_too_long(settings, info)
    forget(out)
    prompts = [joined(rows, number, settings.prompt_tokens) for number in range(settings.prompts)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # which begins anew and inherits nothing
            low = low_agreements(info, prompts, settings, folder, other)
            model = PagedModel.load(info, DTYPE)
            same = agreements(model, prompts, settings, folder, other)
        found, missing = stored(params, model, windows, calibrated, settings, folder)
        record = RestoreRecord(
            provenance=Provenance(
                model=info.slug,
                model_hash=info.model_hash,
                corpus_hash=windows.corpus_hash,
                calibration={calibrated.origin: calibrated.sigma_hash} if calibrated else {},
                versions=versions(),
                device=model.device,
            ),
            machine=machine(),
            threads=torch.get_num_threads(),
            attention=model.attention,
            settings=settings,
            agreements=(*same, *low),
            evicted=tuple(evicted(model, prompts, settings, folder)),
            speeds=tuple(speeds(model, rows, settings, folder)),
            stored=tuple(found),
            unstored=tuple(missing),
            harness=harness(model, rows, settings, folder),
        )
    write_json(out, record.model_dump(mode="json"))


def refuse_too_long(settings: RestoreSettings, info: ModelInfo) -> None:
    """`ParamsError` when a prompt with its answer has no positions."""
    longest = max(settings.prompt_tokens, *settings.lengths, *settings.shorter) + settings.decode
    if longest > info.max_positions:
        raise ParamsError(
            f"prompts with their answers have up to {longest} tokens; {info.slug} has {info.max_positions} positions",
            code="params.too-few-positions",
        )


def low_agreements(
    info: ModelInfo, prompts: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path, other: Executor
) -> tuple[RunAgreement, RunAgreement]:
    """The same comparison in the dtype that is served, with a model that is gone before the next one comes."""
    found = agreements(PagedModel.load(info, LOW_DTYPE), prompts, settings, folder, other)
    gc.collect()
    return found


def harness(model: PagedModel, rows: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path) -> Harness:
    """The verdict on the middle one of the reported lengths; the control is the snapshot of another window."""
    length = sorted(settings.lengths)[len(settings.lengths) // 2]
    prompt, size = joined(rows, 0, length), settings.chunk_tokens
    config, shared = pool_of(size, length + settings.decode), shared_tokens(length, settings.suffix, size)
    own = snapshot_of(model, prompt[:shared], config, folder / "own").path
    foreign = snapshot_of(model, joined(rows, 1, shared), config, folder / "foreign").path
    attempt = PagedAttempt(model, tuple(prompt), config, decode=settings.decode)
    verdict = conduct(attempt, own, foreign, prompt, settings.repeats).verdict
    return Harness(
        length=length,
        prefix_len=shared,
        repeats=settings.repeats,
        outcome=verdict.outcome,
        reasons=tuple(f"{finding.code}: {finding.message}" for finding in verdict.reasons),
        speedup=verdict.speedup,
    )

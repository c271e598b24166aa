"""What each mechanism costs on one engine: quality on text and on needles, bytes and time, for the gate.

A codec runs as a tap, so it works on every engine and only its storage is simulated; an engine's own cache runs as
the engine has it. Both are held against the engine as it is, item by item and in one process.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import polars as pl
import torch
from tqdm import tqdm

from kvlab import corpus, needles
from kvlab.calibration import load as calibration
from kvlab.calibration.load import Fitted
from kvlab.engines.base import Engine
from kvlab.errors import CodecNotActive, CorpusError
from kvlab.experiments.items import SCORERS, VERSIONS, Item, retrievals, texts
from kvlab.experiments.measure import check_canaries, provenance
from kvlab.experiments.plans.mechanism_records import EvalRun, MechanismRow, MechanismsRecord, write_mechanisms
from kvlab.experiments.plans.mechanisms import BASELINE, FIDELITY, METRICS, NEEDLE
from kvlab.experiments.scoring import WindowRun
from kvlab.experiments.subjects import Running, Subject, subject_of
from kvlab.model import resolve
from kvlab.params import Params


def mechanisms(
    params: Params,
    engine: str,
    windows_path: Path,
    needles_path: Path,
    fitted: dict[str, Fitted],
    code: str,
    out: Path,
) -> None:
    """Measure every variant of one engine and write its ``.parquet`` and ``.json``; see
    `plans.mechanism_records`.

    Parameters
    ----------
    fitted : dict of str to Fitted
        The calibrations by origin; empty where no codec needs one.
    code : str
        Digest of the code that measures; it ends in the evidence.

    Raises
    ------
    CalibrationMismatch
        A codec needs a calibration that was not given.
    CorpusError
        The needles' contexts are not as long as the windows'.
    CodecNotActive
        A codec fired less often than it should have, a one-bit codec leaves the logits alone, or the engine's own
        cache does.
    NonFinite
        Logits or coded tensors hold NaN or infinity.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    windows, planted = corpus.load(windows_path, info.model_hash), needles.load(needles_path, info.model_hash)
    if planted.context != windows.context:
        raise CorpusError(
            f"{needles_path} has contexts of {planted.context} tokens, {windows_path} of {windows.context}; run"
            " `kvlab needles` again"
        )
    calibrated = {o: calibration.load(files, info.model_hash, windows.corpus_hash) for o, files in fitted.items()}
    items = {FIDELITY: list(texts(windows)), NEEDLE: list(retrievals(planted))}
    longest = max(len(item.ids) for listed in items.values() for item in listed)
    with closing(Running.start(params, engine, info, longest)) as running:
        subjects = [subject_of(variant, running, calibrated, items) for variant in running.variants]
        canaries = begun(running, subjects, items[FIDELITY][0])
        for quality_eval_id, listed in items.items():
            for item in tqdm(listed, desc=f"{engine} {quality_eval_id}", unit="item"):
                score(quality_eval_id, item, running.plain, subjects)
        record = MechanismsRecord(
            provenance=provenance(running.plain, windows, calibrated),
            needles_hash=planted.needles_hash,
            code=code,
            engine=engine,
            dtype=params.mechanisms.dtype,
            context=windows.context,
            eval=windows.eval,
            rows=rows_of(params.mechanisms.protocol, windows, subjects, canaries),
            missing=tuple(running.missing),
        )
        write_mechanisms(out, record, pl.concat([subject.table() for subject in subjects]))


def begun(running: Running, subjects: list[Subject], item: Item) -> dict[tuple[str, str], float]:
    """Every subject warmed up on an item, and `check_canaries` of it."""
    run = WindowRun(running.plain, item.ids, item.context, item.number)
    for subject in subjects:
        subject.warm_up(item, run)
    return check_canaries(run, [subject.variant.cell for subject in subjects if subject.variant.cell])


def score(quality_eval_id: str, item: Item, plain: Engine, subjects: list[Subject]) -> None:
    """One item under every variant, each held against the same clean pass."""
    run = WindowRun(plain, item.ids, item.context, item.number)
    reference, labels = run.reference[item.first :], run.labels[item.first :]
    untouched = SCORERS[quality_eval_id](reference, reference, labels)
    for subject in subjects:
        logits = subject.logits(quality_eval_id, item, run)[item.first :].to(reference.device)
        found = SCORERS[quality_eval_id](reference, logits, labels)
        subject.keep(quality_eval_id, item, found, untouched)


def rows_of(
    protocol: str, windows: corpus.TokenWindows, subjects: list[Subject], canaries: dict
) -> tuple[MechanismRow, ...]:
    """A row for each variant."""
    found = []
    unchanged = next(subject for subject in subjects if subject.variant.label == BASELINE)
    for subject in subjects:
        variant, storage = subject.variant, subject.engine.storage
        runs = tuple(eval_run(subject, quality_eval_id, windows.context) for quality_eval_id in METRICS)
        cell = variant.cell
        found.append(
            MechanismRow(
                label=variant.label,
                mechanism=variant.mechanism,
                mechanism_variant=variant.variant,
                method=variant.method,
                scope=variant.scope,
                bits=variant.bits,
                protocol=variant.protocol(protocol),
                span=variant.span,
                recipe_id=variant.recipe_id,
                kv_cache_dtype=storage.dtype,
                cache_class=storage.cache,
                codec=cell.recipe.k.codec if cell else None,
                throughput_tok_s=windows.test.shape[1] / subject.median_of("whole"),
                seconds=tuple(took.whole for took in subject.took),
                compression_overhead_ms=1e3 * subject.median_of("encode") if cell else None,
                decompression_overhead_ms=1e3 * subject.median_of("decode") if cell else None,
                canary_kl=canaries[cell.protocol, cell.placement] if cell else own_canary(subject, unchanged),
                **runs[0].model_dump(include={"fires", "expected_fires", "kv_bytes", "kv_values"}),
                evals=runs,
            )
        )
    return tuple(found)


def eval_run(subject: Subject, quality_eval_id: str, context: int) -> EvalRun:
    """What ran while an eval was scored; `CodecNotActive` when a codec did not fire as often as it should have."""
    values = subject.values[quality_eval_id]
    items = len({score["item"] for score in subject.scores if score["quality_eval_id"] == quality_eval_id})
    which = {"quality_eval_id": quality_eval_id, "version": VERSIONS[quality_eval_id], "items": items}
    if subject.variant.cell is None:
        held = values * subject.engine.storage.itemsize
        return EvalRun(**which, fires=0, expected_fires=0, kv_bytes=held, kv_values=values)
    coding = subject.coders[quality_eval_id].coding(subject.engine.info, context, subject.engine.dtype)
    return EvalRun(
        **which,
        fires=coding.fires,
        expected_fires=coding.expected_fires,
        kv_bytes=coding.coded_bytes + coding.raw_bytes,
        kv_values=coding.values,
    )


def own_canary(subject: Subject, unchanged: Subject) -> float | None:
    """What an engine's own cache does to the logits; None of the engine as it is.

    Raises
    ------
    CodecNotActive
        It does no more than a second run of the engine as it is: the pass did not read what the cache stores.
    """
    if subject.variant.cache_dtype is None:
        return None
    kl = subject.mean("kl")
    if kl <= unchanged.mean("kl"):
        raise CodecNotActive(
            f"a cache of {subject.variant.cache_dtype} leaves every logit of {subject.engine.name} as it is; attention"
            " does not read what is stored"
        )
    return kl

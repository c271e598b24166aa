"""Codec off: how far is each engine, dtype and attention kernel from the fp32 truth?

The truth is transformers in float32 with eager attention, run beside the engine in question and
compared window by window, so that no logits are stored. In float32 the two engines must also agree
when both run the same codec; that is checked here, for identity and for the studied recipe.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import torch
from tqdm import tqdm

from kvlab import corpus
from kvlab.calibration import load as calibration
from kvlab.calibration.load import Calibrated
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.errors import UnknownName
from kvlab.experiments.coding import Coder
from kvlab.experiments.measure import provenance
from kvlab.experiments.plan import baseline_runs
from kvlab.experiments.scoring import WindowRun
from kvlab.model import resolve
from kvlab.params import Params, coded_layers, studied_recipe
from kvlab.recipe import IDENTITY, Cell
from kvlab.records import BaselineCell, BaselineRecord, write_json, write_table

TRUTH = ("hf", "float32", "eager")


def baseline(
    params: Params, run: str, windows_path: Path, sigma: Path | None, codebooks: Path | None, out: Path
) -> None:
    """Measure one run of the engine baseline and write its ``.parquet`` and ``.json``.

    Raises
    ------
    UnknownName
        There is no such run under these parameters.
    """
    torch.set_num_threads(params.jobs.threads)
    runs = baseline_runs(params)
    if run not in runs:
        raise UnknownName("baseline run", run, runs)
    name, dtype, attention = runs[run]
    info = resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    calibrated = calibration.load(sigma, codebooks, info.model_hash) if sigma and codebooks else None
    longest = windows.test.shape[1]
    engine = start(name, info, dtype, attention, max_tokens=longest)
    truth = engine
    if (name, dtype, attention) != TRUTH:
        truth = start(TRUTH[0], info, TRUTH[1], TRUTH[2], max_tokens=longest)
    pairs = agreement_pairs(params, name, calibrated) if name != "hf" and dtype == "float32" else []
    entries = [BaselineCell.of(run, *runs[run], "plain", None)]
    entries += [BaselineCell.of(run, *runs[run], what, ours.cell.protocol) for what, _, ours in pairs]
    tables = []
    for number, ids in enumerate(tqdm(windows.test.tolist(), desc=f"baseline {run}", unit="window")):
        reference, alternative = (WindowRun(e, ids, windows.context, number) for e in (truth, engine))
        tables.append(reference.rows(entries[0].cell_id, alternative.reference))
        for entry, (_, theirs, ours) in zip(entries[1:], pairs, strict=True):
            expected = reference.logits(theirs.cell, theirs)
            tables.append(reference.rows(entry.cell_id, alternative.logits(ours.cell, ours), expected))
    write_table(out, pl.concat(tables))
    record = BaselineRecord(
        provenance=provenance(engine, windows, calibrated),
        run=run,
        engine=name,
        dtype=dtype,
        attention=attention,
        context=windows.context,
        eval=windows.eval,
        cells=tuple(entries),
    )
    write_json(Path(out).with_suffix(".json"), record.model_dump(mode="json"))
    _close(engine, truth)


def agreement_pairs(params: Params, engine: str, calibrated: Calibrated | None) -> list[tuple[str, Coder, Coder]]:
    """(what, coder on HF, the same coder on `engine`) for identity and the studied recipe, by protocol."""
    choices = {"identity": (IDENTITY, tuple(range(params.model.n_layers)))}
    choices["kv"] = (studied_recipe(params), coded_layers(params))
    pairs = []
    for what, (recipe, layers) in choices.items():
        for protocol in params.protocols:
            cells = [
                Cell(
                    study="cells",
                    label=what,
                    engine=name,
                    dtype="float32",
                    protocol=protocol,
                    stream="kv",
                    layers=layers,
                    windows=params.windows.test,
                    recipe=recipe,
                )
                for name in ("hf", engine)
            ]
            pairs.append((what, *(Coder(cell, calibrated) for cell in cells)))
    return pairs


def _close(*engines: Engine) -> None:
    for engine in set(engines):
        engine.close()

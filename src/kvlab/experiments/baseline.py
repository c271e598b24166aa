"""Codec off: how far is each engine, dtype and attention kernel from the fp32 truth?

The truth is transformers in float32 with eager attention, run beside the engine in question and
compared window by window, so that no logits are stored. In a lower dtype the other engine is held against
transformers in that same dtype too: what is then between the engines. In float32 the two engines must also agree
when both run the same codec; that is checked here, for identity and for the studied recipe. Beside it
stands what a rounding error does to the codec on the truth's own engine, since a codec's rounding is
discontinuous and carries a difference in the last bit up through the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
from tqdm import tqdm

from kvlab import corpus
from kvlab.calibration import load as calibration
from kvlab.calibration.load import Calibrated, Fitted
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.errors import UnknownName
from kvlab.experiments.coding import Coder, JitteredCoder
from kvlab.experiments.measure import provenance
from kvlab.experiments.plan import baseline_runs
from kvlab.experiments.plans.baseline import TRUTH, peer_of
from kvlab.experiments.scoring import WindowRun
from kvlab.model import resolve
from kvlab.params import Params, coded_layers, studied_recipe
from kvlab.recipe import IDENTITY, Cell, Recipe
from kvlab.records import BaselineCell, BaselineRecord, write_job


def baseline(
    params: Params,
    run: str,
    windows_path: Path,
    fitted: Fitted | None,
    out: Path,
) -> None:
    """Measure one run of the engine baseline and write its ``.parquet`` and ``.json``.

    Another engine's run below float32 holds three models at a time: its own, the truth, and its peer.

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
    calibrated = calibration.load(fitted, info.model_hash, windows.corpus_hash) if fitted else None
    longest = windows.test.shape[1]
    engine = start(name, info, dtype, attention, max_tokens=longest)
    truth = engine
    if (name, dtype, attention) != TRUTH:
        truth = start(TRUTH[0], info, TRUTH[1], TRUTH[2], max_tokens=longest)
    against = peer_of(runs, run)
    peer = start(runs[against][0], info, *runs[against][1:], max_tokens=longest) if against else None
    trials = agreement_trials(params, name, calibrated) if name != "hf" and dtype == "float32" else []
    entries = [BaselineCell.of(run, *runs[run], "plain", None)]
    entries += [BaselineCell.of(run, *runs[run], "peer", None, against)] if against else []
    entries += [BaselineCell.of(run, *runs[run], what, trial.protocol) for trial in trials for what in trial.names]
    tokens = compare(run, windows, truth, engine, peer, entries, trials)
    for coder in (coder for trial in trials for coder in trial.coders):
        coder.refuse_idle()
    record = BaselineRecord(
        provenance=provenance(engine, windows, {calibrated.origin: calibrated} if calibrated else {}),
        run=run,
        engine=name,
        dtype=dtype,
        attention=attention,
        context=windows.context,
        eval=windows.eval,
        cells=tuple(entries),
    )
    write_job(out, record, tokens)
    for one in {engine, truth, peer} - {None}:
        one.close()


def compare(
    run: str,
    windows: corpus.TokenWindows,
    truth: Engine,
    engine: Engine,
    peer: Engine | None,
    entries: list[BaselineCell],
    trials: list[Trial],
) -> pl.DataFrame:
    """Token rows of all comparisons, window by window, so that memory holds one window's logits.

    `entries` names them in this order: with the truth, with `peer` if there is one, then the trials' own.
    """
    tables = []
    for number, ids in enumerate(tqdm(windows.test.tolist(), desc=f"baseline {run}", unit="window")):
        reference, ours = (WindowRun(one, ids, windows.context, number) for one in (truth, engine))
        pairs = [(ours.reference, reference.reference)]
        if peer:
            pairs.append((ours.reference, WindowRun(peer, ids, windows.context, number).reference))
        pairs += [pair for trial in trials for pair in trial.logits(reference, ours)]
        tables += [reference.rows(entry.cell_id, *pair) for entry, pair in zip(entries, pairs, strict=True)]
    return pl.concat(tables)


@dataclass(frozen=True)
class Trial:
    """The same codec on the truth's engine and on another, under one protocol.

    `jittered` is that codec once more on the truth's engine, behind a rounding error; None for a codec
    that rounds nothing.
    """

    what: str
    protocol: str
    theirs: Coder
    ours: Coder
    jittered: Coder | None

    @property
    def coders(self) -> list[Coder]:
        """All that must have fired."""
        return [coder for coder in (self.theirs, self.ours, self.jittered) if coder is not None]

    @property
    def names(self) -> list[str]:
        """What is compared, in the order of `logits`."""
        return [self.what] if self.jittered is None else [self.what, "jitter"]

    def logits(self, reference: WindowRun, ours: WindowRun) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(alternative, expected) logits of one window."""
        expected = reference.logits(self.theirs.cell, self.theirs)
        pairs = [(ours.logits(self.ours.cell, self.ours), expected)]
        if self.jittered is not None:
            pairs.append((reference.logits(self.jittered.cell, self.jittered), expected))
        return pairs


def agreement_trials(params: Params, engine: str, calibrated: Calibrated | None) -> list[Trial]:
    """Identity and the studied recipe under every protocol."""

    def cell(what: str, protocol: str, name: str, recipe: Recipe, layers: tuple[int, ...]) -> Cell:
        shared = {"study": "factors", "dtype": "float32", "stream": "kv", "windows": params.windows.test}
        shared["origin"] = params.calibration.origin
        return Cell(label=what, engine=name, protocol=protocol, layers=layers, recipe=recipe, **shared)

    trials = []
    for protocol in params.protocols:
        everything = tuple(range(params.model.n_layers))
        hf, other = (cell("identity", protocol, name, IDENTITY, everything) for name in ("hf", engine))
        trials.append(Trial("identity", protocol, Coder(hf, None), Coder(other, None), None))
        recipe, layers = studied_recipe(params), coded_layers(params)
        hf, other = (cell("kv", protocol, name, recipe, layers) for name in ("hf", engine))
        coders = Coder(hf, calibrated), Coder(other, calibrated), JitteredCoder(hf, calibrated)
        trials.append(Trial("kv", protocol, *coders))
    return trials

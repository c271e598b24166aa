"""The bench from end to end: measure every codec, write ``bench.json``, ``BENCH.md`` and the figures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.calibration.archive import Archive
from kvlab.calibration.capture import Captured
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.klt import KltStream
from kvlab.core.errors import KvlabError, MixedIdentity, StorageError, UserError
from kvlab.core.machine import cpu_name, machine
from kvlab.core.model import resolve
from kvlab.core.origin import told_of
from kvlab.core.params import Params
from kvlab.core.records import versions, write_json
from kvlab.text import corpus
from validation.bench import caches, clock, divergence, page, published, sources
from validation.bench.rivals import INSTALL, LIBRARIES
from validation.bench.score import Scorer, limit_row, whole
from validation.bench.subjects import BenchCodec, calibrate, roster
from validation.bench.summary import mean


@dataclass(frozen=True)
class Inputs:
    """What the bench may read; all of it is optional.

    Parameters
    ----------
    capture : Path or None
        What `kvlab step capture` wrote.
    sigma : Path or None
        A published Sigma_q file (``layer_<l>_sigma``), for the planted streams.
    tensors : Path or None
        Folder of .npy tensors, see `sources.given`.
    ladder : Path or None
        Folder of the ladder study's tables.
    windows : Path or None
        What `kvlab step corpus` wrote, for the rivals' KL on the texts of the ladder study, and for caches that are
        coded as a whole.
    archive : Path or None
        What `kvlab step archive` wrote, for codecs of whole caches.
    """

    capture: Path | None = None
    sigma: Path | None = None
    tensors: Path | None = None
    ladder: Path | None = None
    windows: Path | None = None
    archive: Path | None = None


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Parameters
    ----------
    rounds : int
        Of the clock.
    threads : tuple of int
        Numbers of threads to time with.
    windows : int or None
        Of each text for the KL, for libraries and ladder alike; None takes all that the ladder scored.
    """

    rounds: int = 7
    threads: tuple[int, ...] = (1, 2)
    windows: int | None = None

    def checked(self, params: Params) -> Effort:
        """Itself with `windows` filled in; `UserError` when something cannot be measured."""
        if self.rounds < 1:
            raise UserError(f"{self.rounds} rounds time nothing; give at least one")
        if not self.threads or min(self.threads) < 1:
            raise UserError(f"threads {self.threads} cannot be timed; give numbers from one on")
        windows = params.ladder.windows if self.windows is None else self.windows
        if not 2 <= windows <= params.ladder.windows:
            raise UserError(f"KL over {windows} windows; allowed: 2..{params.ladder.windows} (ladder.windows)")
        return replace(self, windows=windows)


def model_facts(params: Params) -> dict:
    """The model and the scored text in words, and what has to be said of the model's weights."""
    corpus = params.corpus
    names = {"test": corpus.source, "other": corpus.other}
    text = " and ".join(names[text] for text in corpus.scored)
    return {"slug": params.model.slug, "text": text, "disclosure": told_of(Path(params.model.path))}


def bench(params: Params, out: Path, inputs: Inputs, effort: Effort | None = None) -> dict:
    """Measure and write ``bench.json``, ``BENCH.md`` and ``figures/`` into `out`.

    Parameters
    ----------
    params : Params
        Reads ``model``, ``ladder``, ``codec``, ``calibration`` and the bits.
    out : Path
    inputs : Inputs
    effort : Effort, optional

    Returns
    -------
    dict
        What ``bench.json`` holds.
    """
    effort = (effort or Effort()).checked(params)
    found = opened(params, Path(out), inputs, effort)
    torch.set_num_threads(1)  # windows are small; the clock sets its own
    who = roster(params)
    data = {
        "machine": machine() | {"cpu": cpu_name(), "threads": list(effort.threads)},
        "versions": versions() | {lib.distribution: lib.version for lib in LIBRARIES.values() if lib.version},
        "rounds": effort.rounds,
        "model": model_facts(params),
        "missing": who.missing,
        "install": INSTALL,
        "subjects": [
            {"label": one.label, "bits": one.bits, "rival": one.recipe is None, "conditioned": "+" in one.label}
            for one in who.subjects
        ],
        "whole": [],
        "whole_unmeasured": [label for label, _ in caches.whole_rungs(params)] if found.archive is None else [],
        "sources": [],
        "kl": found.ladder,
        "bootstrap": params.stats.model_dump(),
    }
    for source in gather(params, inputs):
        data["sources"].append(measure(source, who.subjects, params, effort))
        write_json(Path(out) / "bench.json", data)  # what was measured stays, whatever happens to the rest
    if found.tokens is not None:
        refused = {label for source in data["sources"] if source["name"] == "capture" for label in source["refused"]}
        rivals = [one for one in who.subjects if one.recipe is None and one.label not in refused]
        info = resolve(params.model)
        data["kl"] = found.ladder | divergence.of_rivals(params, info, rivals, found.tokens, effort.windows)
        write_json(Path(out) / "bench.json", data)
    if found.archive is not None:
        info = resolve(params.model)
        data["whole"] = caches.measured(params, info, found.archive, found.tokens, effort.rounds, effort.threads)
        write_json(Path(out) / "bench.json", data)
    page.write(data, Path(out))
    return data


@dataclass(frozen=True)
class Opened:
    """What is read before anything is measured: the ladder's KL, the windows for that of the rivals, and the codec of
    whole caches, where both it and the windows are given."""

    ladder: divergence.Divergences
    tokens: corpus.TokenWindows | None
    archive: Archive | None = None


def opened(params: Params, out: Path, inputs: Inputs, effort: Effort) -> Opened:
    """Open every input, so that a wrong one costs no measuring; sources are read again when their turn comes.

    Raises
    ------
    UserError, Fault
        An input cannot be read, or does not belong to these parameters.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write into {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise StorageError(f"cannot write into {out}; give another folder with --out")
    info = resolve(params.model) if inputs.capture or inputs.windows or inputs.ladder else None
    capture = Captured(inputs.capture, info.model_hash) if inputs.capture else None
    if inputs.sigma:
        sources.published_weights(inputs.sigma)
    if inputs.tensors:
        sources.given(inputs.tensors)
    tokens = corpus.load(inputs.windows, info.model_hash) if inputs.windows else None
    for text in params.ladder.texts if tokens else ():
        if len(tokens.scored(text)) < effort.windows:
            raise UserError(f"{inputs.windows} holds {len(tokens.scored(text))} {text} windows, not {effort.windows}")
    hashes = {tokens.corpus_hash} if tokens else set()
    hashes |= {capture.metadata["corpus_hash"]} if capture else set()
    if len(hashes) > 1:
        raise MixedIdentity({"corpus_hash of --capture and --windows": hashes})
    if inputs.archive and not tokens:
        raise UserError("--archive is measured on scored windows; name them with --windows", code="user.no-windows")
    asked = inputs.archive if caches.whole_rungs(params) else None
    archive = caches.opened(asked, info, tokens.corpus_hash) if asked else None
    if not inputs.ladder:
        return Opened({}, tokens, archive)
    corpus_hash = next(iter(hashes), None)
    ladder = divergence.of_ladder(params, inputs.ladder, info.model_hash, corpus_hash, effort.windows)
    return Opened(ladder, tokens, archive)


def gather(params: Params, inputs: Inputs) -> Iterable[sources.Source]:
    """The sources that there are, one at a time."""
    if inputs.capture:
        yield sources.captured(inputs.capture, resolve(params.model))
    yield sources.planted_with(inputs.sigma) if inputs.sigma else sources.planted()
    if inputs.tensors:
        yield sources.given(inputs.tensors)


def measure(source: sources.Source, subjects: tuple[BenchCodec, ...], params: Params, effort: Effort) -> dict:
    """Everything about one source."""
    ridge = params.calibration.ridge
    scores: dict[str, list[dict]] = {subject.label: [] for subject in subjects}
    refused: dict[str, str] = {}
    limits, kept, losses = [], {}, {}
    for sample in tqdm(source.samples, desc=f"bench {source.name}", unit="sample"):
        scorer = Scorer(sample, ridge, losses)
        limits.append(limit_row(scorer))
        kept.setdefault(sample.stream, scorer)
        for subject in subjects:
            if subject.label not in refused:
                try:
                    scores[subject.label].append(scorer.score(subject))
                except (KvlabError, ImportError) as error:
                    refused[subject.label] = str(error)
    fit = [subject for subject in subjects if subject.label not in refused]
    return {
        "name": source.name,
        "about": source.about,
        "metric": source.metric,
        "shapes": sorted({tuple(sample.scored.shape) for sample in source.samples}),
        "limits": limits,
        "refused": refused,
        "scores": {subject.label: scores[subject.label] for subject in fit},
        "speed": speeds(kept, fit, effort),
        "published": against_published(source, ridge, effort),
        "whole_speed": own_speeds(source, fit, ridge, effort),
        "prototype": {s: {str(b): e for b, e in by_bits.items()} for s, by_bits in published.PROTOTYPE.items()},
    }


# ------------------------------------------------------------------------------------------- speed


def speeds(scorers: dict[str, Scorer], subjects: list[BenchCodec], effort: Effort) -> dict:
    """MB/s of bfloat16 by label, stream and task, with each number of threads; on one window each."""
    tasks, sizes = {}, {}
    for stream, scorer in scorers.items():
        x = scorer.sample.scored[0].contiguous()
        for subject in subjects:
            coder = scorer.coder(subject)
            named = actions(coder, x, scorer.sample.layer, stream)
            tasks |= {(subject.label, stream, *name): task for name, task in named}
        sizes[stream] = 2 * x.numel()
    taken = clock.interleaved(tasks, effort.rounds, effort.threads)
    found: dict = {}
    for (label, stream, task, threads), seconds in taken.items():
        by_task = found.setdefault(label, {}).setdefault(stream, {}).setdefault(task, {})
        by_task[str(threads)] = clock.rate(sizes[stream], seconds)
    return found


def actions(coder, x: torch.Tensor, layer: int, stream: str) -> Iterable[tuple[tuple[str], object]]:
    """Encode and decode, and both with bytes between (write, read): those that a coder has, on one tensor."""
    site = Site(0, layer, stream)
    coded = coder.encode(x, site)
    yield ("encode",), lambda: coder.encode(x, site)
    if coder.decodes:
        yield ("decode",), lambda: coder.decode(coded)
    if coder.serialises:
        data = coder.write(coded)
        yield ("write",), lambda: coder.write(coder.encode(x, site))
        yield ("read",), lambda: coder.decode(coder.read(data))


# --------------------------------------------------------------------------- beside published numbers


def against_published(source: sources.Source, ridge: float, effort: Effort) -> list[dict]:
    """kvlab's block codec at each published setting on the same tensors, with what was published."""
    rows = []
    for theirs in published.LINES:
        samples = [s for s in source.samples if s.whole is not None and (s.stream, s.layer) in theirs.places]
        if len(samples) != len(theirs.places):
            continue
        row = {"label": theirs.name, "stream": theirs.stream, "theirs": theirs.numbers()}
        subject = BenchCodec(theirs.label, 3, theirs.recipe())
        try:
            ours = [whole(subject, sample, ridge) for sample in samples]
            first = samples[0]
            fit = calibrate(first.whole[None], first, first.weight, ridge)
            speed = whole_speed(subject, first, fit, effort)
        except (KvlabError, ImportError) as error:
            rows.append(row | {"refused": str(error)})
            continue
        errors = {"bits": mean(one["bits"] for one in ours), "error_db": mean(one["nmse_db"] for one in ours)}
        rows.append(row | {"ours": errors | speed})
    return rows


def own_speeds(source: sources.Source, subjects: list[BenchCodec], ridge: float, effort: Effort) -> dict:
    """MB/s of `klt` on the tensors that the published codec was timed on, by label and stream."""
    found: dict = {}
    for stream in ("k", "v"):
        sample = next((s for s in source.samples if s.whole is not None and s.stream == stream), None)
        if sample is None:
            continue
        fit = calibrate(sample.calib, sample, sample.calib_weight, ridge)
        for subject in subjects:
            if isinstance(subject.of(stream), KltStream):
                found.setdefault(subject.label, {})[stream] = whole_speed(subject, sample, fit, effort)
    return found


def whole_speed(subject: BenchCodec, sample: sources.StreamSample, fit: StreamCalibration, effort: Effort) -> dict:
    """MB/s of bfloat16 on all tokens at once, bytes included, on all cores that the bench uses."""
    x = sample.whole
    tasks = dict(actions(subject.coder(sample.stream, x.shape[-1], fit), x, sample.layer, sample.stream))
    taken = clock.interleaved({key: tasks[key] for key in (("write",), ("read",))}, effort.rounds, effort.threads)
    most = max(effort.threads)
    return {
        "encode": clock.rate(2 * x.numel(), taken["write", most]),
        "decode": clock.rate(2 * x.numel(), taken["read", most]),
    }

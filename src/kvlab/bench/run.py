"""The bench from end to end: measure every codec, write ``bench.json``, ``BENCH.md`` and the figures."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.bench import clock, divergence, page, published, sources
from kvlab.bench.rivals import INSTALL, LIBRARIES
from kvlab.bench.score import Scorer, limit_row, whole
from kvlab.bench.subjects import Roster, Subject, calibrate, roster
from kvlab.codec.base import Site
from kvlab.errors import KvlabError
from kvlab.model import resolve
from kvlab.params import Params
from kvlab.records import machine, versions, write_json


@dataclass(frozen=True)
class Inputs:
    """What the bench may read; all of it is optional.

    Parameters
    ----------
    capture : Path or None
        What `kvlab capture` wrote.
    sigma : Path or None
        A published Sigma_q file (``layer_<l>_sigma``), for the planted streams.
    tensors : Path or None
        Folder of .npy tensors, see `sources.given`.
    ladder : Path or None
        Folder of the ladder study's tables.
    windows : Path or None
        What `kvlab corpus` wrote, for the rivals' KL on the texts of the ladder study.
    """

    capture: Path | None = None
    sigma: Path | None = None
    tensors: Path | None = None
    ladder: Path | None = None
    windows: Path | None = None


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of the clock, thread counts, windows of the rivals' KL."""

    rounds: int = 7
    threads: tuple[int, ...] = (1, 2)
    windows: int = 8


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
    effort = effort or Effort()
    torch.set_num_threads(1)  # windows are small; the clock sets its own
    who = roster(params)
    measured = [measure(source, who.subjects, params, effort) for source in gather(params, inputs)]
    data = {
        "machine": machine() | {"cpu": cpu_name(), "threads": list(effort.threads)},
        "versions": versions() | {lib.distribution: lib.version for lib in LIBRARIES.values() if lib.version},
        "rounds": effort.rounds,
        "missing": who.missing,
        "install": INSTALL,
        "subjects": [
            {"label": one.label, "bits": one.bits, "rival": one.recipe is None, "conditioned": "+" in one.label}
            for one in who.subjects
        ],
        "sources": measured,
        "kl": divergences(params, who, inputs, effort),
        "kl_windows": effort.windows,
    }
    write_json(Path(out) / "bench.json", data)
    page.write(data, Path(out))
    return data


def gather(params: Params, inputs: Inputs) -> Iterable[sources.Source]:
    """The sources that there are, one at a time."""
    if inputs.capture:
        yield sources.captured(inputs.capture, resolve(params.model))
    yield sources.planted_with(inputs.sigma) if inputs.sigma else sources.planted()
    if inputs.tensors:
        yield sources.given(inputs.tensors)


def measure(source: sources.Source, subjects: tuple[Subject, ...], params: Params, effort: Effort) -> dict:
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
        "shapes": sorted({tuple(sample.scored.shape) for sample in source.samples}),
        "limits": limits,
        "refused": refused,
        "scores": {subject.label: scores[subject.label] for subject in fit},
        "speed": speeds(kept, fit, effort),
        "published": against_published(source, ridge, effort),
        "prototype": {s: {str(b): e for b, e in by_bits.items()} for s, by_bits in published.PROTOTYPE.items()},
    }


# ------------------------------------------------------------------------------------------- speed


def speeds(scorers: dict[str, Scorer], subjects: list[Subject], effort: Effort) -> dict:
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
        subject = Subject(theirs.label, 3, theirs.recipe())
        try:
            ours = [whole(subject, sample, ridge) for sample in samples]
            speed = whole_speed(subject, samples[0], ridge, effort)
        except (KvlabError, ImportError) as error:
            rows.append({"label": theirs.label, "stream": theirs.stream, "refused": str(error)})
            continue
        rows.append(
            {
                "label": theirs.name,
                "stream": theirs.stream,
                "theirs": {"bits": theirs.bits, "error_db": sum(theirs.error_db) / len(theirs.error_db),
                           "encode": theirs.encode, "decode": theirs.decode},
                "ours": {"bits": mean(ours, "bits"), "error_db": mean(ours, "nmse_db"), **speed},
            }
        )  # fmt: skip
    return rows


def whole_speed(subject: Subject, sample: sources.Sample, ridge: float, effort: Effort) -> dict:
    """MB/s of bfloat16, bytes included, on all cores that the bench uses."""
    x = sample.whole
    fit = calibrate(x[None], sample, sample.weight, ridge)
    tasks = dict(actions(subject.coder(sample.stream, x.shape[-1], fit), x, sample.layer, sample.stream))
    taken = clock.interleaved({key: tasks[key] for key in (("write",), ("read",))}, effort.rounds, effort.threads)
    most = max(effort.threads)
    return {
        "encode": clock.rate(2 * x.numel(), taken["write", most]),
        "decode": clock.rate(2 * x.numel(), taken["read", most]),
    }


def mean(rows: list[dict], key: str) -> float:
    """Mean over samples."""
    return sum(row[key] for row in rows) / len(rows)


# ------------------------------------------------------------------------------------- the model, the machine


def divergences(params: Params, who: Roster, inputs: Inputs, effort: Effort) -> divergence.Divergences:
    """KL by label and text; empty where nothing to measure it on was given."""
    found = divergence.of_ladder(inputs.ladder) if inputs.ladder else {}
    rivals = [subject for subject in who.subjects if subject.recipe is None]
    return found | divergence.of_rivals(params, rivals, inputs.windows, effort.windows)


def cpu_name() -> str:
    """The processor's own name; its family where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

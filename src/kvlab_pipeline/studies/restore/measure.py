"""Save, restore and compare on a real model, and write what was found."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.calibration import load as calibration
from kvlab.calibration.load import Calibrated, FittedFiles
from kvlab.calibration.needs import needed_files
from kvlab.codecs.catalogue import has_bits
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CapabilityError, Fault, ParamsError
from kvlab.core.machine import machine
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.recipe import WHOLE, Recipe
from kvlab.core.records import forget, write_json
from kvlab.kvstore.hf.equality import logits_digest
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.restore import RestoreReport, restore
from kvlab.kvstore.snapshot.payload import ChunkCoder, RawChunks, recipe_coder
from kvlab.kvstore.snapshot.write import Saved
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.stats.divergences import token_record
from kvlab.text import corpus
from kvlab_pipeline.jobs.measure import provenance
from kvlab_pipeline.studies.restore.harness import PagedAttempt, conduct
from kvlab_pipeline.studies.restore.record import (
    Evicted,
    Harness,
    RestoreRecord,
    RestoreSettings,
    RunAgreement,
    Speed,
    StorageResult,
    Unstored,
)

DTYPE, LOW_DTYPE = "float32", "bfloat16"
RAW = "as they are"


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
    longest = max(settings.prompt_tokens, *settings.lengths, *settings.shorter) + settings.decode
    if longest > info.max_positions:
        raise ParamsError(
            f"prompts with their answers have up to {longest} tokens; {info.slug} has {info.max_positions} positions",
            code="params.too-few-positions",
        )
    forget(out)
    prompts = [joined(rows, number, settings.prompt_tokens) for number in range(settings.prompts)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # which begins anew and inherits nothing
            low = agreements(PagedModel.load(info, LOW_DTYPE), prompts, settings, folder, other)
            gc.collect()  # that model is gone before the next one comes
            model = PagedModel.load(info, DTYPE)
            same = agreements(model, prompts, settings, folder, other)
        found, missing = stored(params, model, windows, calibrated, settings, folder)
        record = RestoreRecord(
            provenance=provenance(info, windows, {calibrated.origin: calibrated} if calibrated else {}),
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


# Prompts of any length out of the test windows, and snapshots of what they begin with.


def joined(windows: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """Tokens of windows one after the other, from window `first` on; after the last one comes the first again.

    Raises
    ------
    ParamsError
        When all windows together are shorter.
    """
    count, width = len(windows), len(windows[0])
    if length > count * width:
        raise ParamsError(
            f"a prompt of {length} tokens was asked for; the test windows have {count * width}",
            code="params.too-few-tokens",
        )
    needed = -(-length // width)
    return [int(token) for n in range(needed) for token in windows[(first + n) % count]][:length]


def pool_of(chunk_tokens: int, tokens: int) -> PagerConfig:
    """The smallest pool that is possible with a first and a last chunk that stay, and holds so many tokens."""
    blocks = max(4, -(-tokens // chunk_tokens))
    return PagerConfig(blocks * chunk_tokens, chunk_tokens, sink_chunks=1, tail_chunks=1)


def shared_tokens(length: int, suffix: int, chunk_tokens: int) -> int:
    """How much of a prompt its snapshot holds: whole chunks, at least one, and never the whole prompt.

    Of a prompt that is shorter than two suffixes, a half is new.
    """
    whole = (length - min(suffix, length // 2)) // chunk_tokens * chunk_tokens
    if not 0 < (found := max(whole, chunk_tokens)) < length:
        raise ParamsError(
            f"a prompt of {length} tokens shares no whole chunk of {chunk_tokens} and leaves something",
            code="params.no-shared-chunk",
        )
    return found


def begun(
    model: PagedModel,
    prompt: Sequence[int],
    config: PagerConfig,
    settings: RestoreSettings,
    path: Path,
    policy: str = "lru",
) -> tuple[Saved, float]:
    """A snapshot of a prompt's beginning, prefilled in a run of its own, and milliseconds of writing it."""
    run = PagedRun(model, config, policy)
    run.extend(prompt[: shared_tokens(len(prompt), settings.suffix, settings.chunk_tokens)])
    return timed_save(run, path)


def timed_save(run: PagedRun, path: Path, **how) -> tuple[Saved, float]:
    """Save a run, and milliseconds of it."""
    started = time.perf_counter()
    saved = run.save(path, **how)
    return saved, 1e3 * (time.perf_counter() - started)


def timed(value: float | None) -> float:
    """A time that has to be there; `Fault` when it was not taken, for none is not zero."""
    if value is None:
        raise Fault("a restore did not say how long it took, so no ratio of times can be given", code="fault.untimed")
    return value


# Whether a warm run can be told from a cold one: by its tokens, by its logits, in another process, in a small pool.


class Answer(NamedTuple):
    """What a run gave: tokens, digest of the logits after the prompt and after every token, tokens restored."""

    tokens: tuple[int, ...]
    logits: str
    prefix_len: int


def agreements(
    model: PagedModel, prompts: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path, other: Executor
) -> list[RunAgreement]:
    """Cold against warm, in this process and in `other`, which knows nothing but the files."""
    config = pool_of(settings.chunk_tokens, len(prompts[0]) + settings.decode)
    paths = [folder / f"{model.dtype}-{number}" for number in range(len(prompts))]
    for prompt, path in zip(prompts, paths, strict=True):
        begun(model, prompt, config, settings, path)
    bar = tqdm(prompts, desc=f"cold {model.dtype}", unit="prompt")
    cold = [answer(model, prompt, None, config, settings.decode) for prompt in bar]
    asked = (prompts, paths, config, settings.decode)
    setting = (model.info, model.dtype, model.attention, torch.get_num_threads())
    warm = {"this": answers(model, *asked), "new": other.submit(answers_anew, *setting, asked).result()}
    return [
        RunAgreement(
            process=process,
            dtype=model.dtype,
            prompts=len(cold),
            decode=settings.decode,
            prefix_len=min(one.prefix_len for one in found),
            tokens_equal=sum(ours.tokens == theirs.tokens for ours, theirs in zip(cold, found, strict=True)),
            logits_equal=sum(ours.logits == theirs.logits for ours, theirs in zip(cold, found, strict=True)),
        )
        for process, found in warm.items()
    ]


def answers(
    model: PagedModel, prompts: Sequence[Sequence[int]], snapshots: Sequence[Path], config: PagerConfig, decode: int
) -> list[Answer]:
    """Every prompt, from its snapshot."""
    pairs = zip(prompts, snapshots, strict=True)
    return [answer(model, prompt, snapshot, config, decode) for prompt, snapshot in pairs]


def answers_anew(info: ModelInfo, dtype: str, attention: str, threads: int, asked: tuple) -> list[Answer]:
    """The same in a process that has to load the model first; equal threads, for they decide the last bits."""
    torch.set_num_threads(threads)
    return answers(PagedModel.load(info, dtype, attention), *asked)


def answer(model: PagedModel, prompt: Sequence[int], snapshot: Path | None, config: PagerConfig, decode: int) -> Answer:
    """One prompt, cold without a snapshot; with one it has to be used."""
    done = restore(model, prompt, snapshot, config, mode="consume" if snapshot else "recompute")
    decoded = done.run.decode(decode)
    return Answer(decoded.tokens, logits_digest(torch.cat([done.logits[None], decoded.logits])), done.report.prefix_len)


def evicted(
    model: PagedModel, prompts: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path
) -> list[Evicted]:
    """Cold against warm where chunks have to go, policy by policy, by the restore that does both."""
    config = pool_of(settings.chunk_tokens, int(len(prompts[0]) * settings.pool))
    found = []
    for policy in tqdm(settings.policies, desc="small pool", unit="policy"):
        said = []
        for number, prompt in enumerate(prompts[: settings.evicted_prompts]):
            saved, _ = begun(model, prompt, config, settings, folder / f"{policy}-{number}", policy)
            how = {"mode": "verify", "decode": settings.decode}
            said.append(restore(model, prompt, saved.path, config, policy, **how).report)
        compared = [report.comparison for report in said if report.comparison]
        found.append(
            Evicted(
                policy=policy,
                pool_tokens=config.pool_tokens,
                prompts=len(said),
                restored=len(compared),
                prefix_len=min(report.prefix_len for report in said),
                page_outs=min(report.page_outs for report in said),
                tokens_equal=sum(one.tokens_equal for one in compared),
                residency_equal=sum(one.residency_equal for one in compared),
                max_abs_dlogit=max((one.max_abs_dlogit for one in compared), default=None),
            )
        )
    return found


def harness(model: PagedModel, rows: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path) -> Harness:
    """The verdict on the middle one of the reported lengths; the control is the snapshot of another window."""
    length = sorted(settings.lengths)[len(settings.lengths) // 2]
    prompt = joined(rows, 0, length)
    config = pool_of(settings.chunk_tokens, length + settings.decode)
    own, _ = begun(model, prompt, config, settings, folder / "own")
    foreign, _ = begun(model, joined(rows, 1, length), config, settings, folder / "foreign")
    attempt = PagedAttempt(model, tuple(prompt), config, decode=settings.decode)
    verdict = conduct(attempt, own.path, foreign.path, prompt, settings.repeats).verdict
    return Harness(
        length=length,
        prefix_len=shared_tokens(length, settings.suffix, settings.chunk_tokens),
        repeats=settings.repeats,
        outcome=verdict.outcome,
        reasons=tuple(f"{finding.code}: {finding.message}" for finding in verdict.reasons),
        speedup=verdict.speedup,
    )


# How long a prompt takes cold, restored, and in the one forward that nothing has to be cut for.


def speeds(model: PagedModel, windows: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path) -> list[Speed]:
    """Every length, the shortest first."""
    lengths = tqdm(sorted({*settings.lengths, *settings.shorter}), desc="prefill", unit="length")
    return [speed(model, joined(windows, 0, length), settings, folder / f"length-{length}") for length in lengths]


def speed(model: PagedModel, prompt: Sequence[int], settings: RestoreSettings, path: Path) -> Speed:
    """One prompt: the ways take turns, another one first each round, after a round that does not count."""
    config = pool_of(settings.chunk_tokens, len(prompt))
    saved, save_ms = begun(model, prompt, config, settings, path)
    reports: list[RestoreReport] = []

    def cold() -> float:
        return timed(restore(model, prompt, None, config, mode="recompute").report.prefill_ms)

    def warm() -> float:
        reports.append(restore(model, prompt, saved.path, config, mode="consume").report)
        return timed(reports[-1].prefill_ms)

    cold_ms, warm_ms, whole_ms = turns([cold, warm, lambda: whole(model, prompt)], settings.rounds)
    counted = reports[1:]
    return Speed(
        length=len(prompt),
        prefix_len=min(report.prefix_len for report in counted),
        cold_ms=cold_ms,
        warm_ms=warm_ms,
        load_ms=tuple(timed(report.load_ms) for report in counted),
        whole_ms=whole_ms,
        save_ms=save_ms,
        bytes_read=counted[0].bytes_read,
        file_bytes=saved.nbytes,
    )


def turns(ways: Sequence[Callable[[], float]], rounds: int) -> list[tuple[float, ...]]:
    """What each way took in each round; the first round of all warms up and is left out."""
    took: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for number in range(len(ways)):
            chosen = (turn + number) % len(ways)
            took[chosen].append(ways[chosen]())
    return [tuple(found[1:]) for found in took]


@torch.no_grad()
def whole(model: PagedModel, prompt: Sequence[int]) -> float:
    """Milliseconds of one forward over a prompt, into transformers' own cache."""
    ids = torch.tensor([list(prompt)], device=model.device)
    started = time.perf_counter()
    model.model(ids, use_cache=True, logits_to_keep=1).logits.cpu()
    return 1e3 * (time.perf_counter() - started)


# K and V stored as they are against every codec: bytes, times, and what the next tokens make of it.


@dataclass
class StorageWay:
    """One way to store K and V, and what was found of it, window by window."""

    label: str
    coder: ChunkCoder
    payload_bytes: int = 0
    save_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    found: list[dict[str, Tensor]] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)


def stored(
    params: Params,
    model: PagedModel,
    windows: corpus.TokenWindows,
    calibrated: Calibrated | None,
    settings: RestoreSettings,
    folder: Path,
) -> tuple[list[StorageResult], list[Unstored]]:
    """Every way over the same windows, each against the restore from K and V as they are, which is the first way."""
    size, length = settings.codec_chunk_tokens, windows.test.shape[1]
    config, context = pool_of(size, length + settings.decode), model.geometry(size).floor(windows.context)
    chosen, missing = ways(params, model, calibrated, settings, length)
    scored = windows.test[: settings.windows].tolist()
    for number, row in enumerate(tqdm(scored, desc="coded", unit="window")):
        run = PagedRun(model, config)
        run.extend(row[:context])
        labels, golden = torch.tensor(row[context + 1 :]), None
        for way in chosen:
            logits, tokens = heard_from(way, run, row, context, folder / f"window-{number}", settings.decode)
            golden = golden or (logits, tokens)
            way.found.append(token_record(golden[0], logits, labels))
            way.greedy.append(common(golden[1], tokens))
    bootstrap = Bootstrap(**params.stats.model_dump())
    tokens = context * len(scored)
    return [summary(way, model, tokens, settings, bootstrap) for way in chosen], missing


def ways(
    params: Params, model: PagedModel, calibrated: Calibrated | None, settings: RestoreSettings, tokens: int
) -> tuple[list[StorageWay], list[Unstored]]:
    """K and V as they are, then every codec that is asked for, and those that cannot be had here."""
    geometry, rotations = model.geometry(settings.codec_chunk_tokens), model.turns(tokens)
    found, missing = [StorageWay(RAW, RawChunks(geometry))], []
    for codec in settings.codecs:
        for bits in settings.bits if has_bits(codec) else (None,):
            # As on the ladder, or by a codec of whole caches.
            recipe = named_recipe(codec, bits, params=None if codec in WHOLE else params)
            label = codec if bits is None else f"{codec} {bits}"
            if lacking := unfitted(recipe, calibrated):
                missing.append(Unstored(label=label, reason=f"it needs {' and '.join(lacking)} of a calibration"))
                continue
            try:
                found.append(StorageWay(label, recipe_coder(geometry, recipe, calibrated, turns=rotations)))
            except CapabilityError as error:
                missing.append(Unstored(label=label, reason=str(error)))
    return found, missing


def unfitted(recipe: Recipe, calibrated: Calibrated | None) -> list[str]:
    """What a recipe reads that was not fitted here, by the names of its files."""
    if recipe.k.codec in WHOLE:
        return [] if calibrated and calibrated.archive else [recipe.k.codec]
    return [] if calibrated else needed_files(recipe)


def heard_from(
    way: StorageWay, run: PagedRun, row: list[int], context: int, path: Path, decode: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Save a context one way, restore from it, and go on: logits after given tokens, and tokens that it writes."""
    saved, save_ms = timed_save(run, path, coder=way.coder)
    how = {"mode": "consume", "coder": way.coder, "unproven": True, "decode": decode}
    done = restore(run.model, row[: context + 1], path, run.pager.config, **how)
    way.save_ms.append(save_ms)
    way.load_ms.append(timed(done.report.load_ms))
    way.payload_bytes += saved.payload_bytes
    tokens = done.run.fork().decode(decode).tokens
    rest = done.run.score(row[context + 1 :])
    return torch.cat([done.logits[None], rest[:-1]]), tokens


def common(golden: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first different one."""
    pairs = zip(golden, other, strict=True)
    return next((number for number, (one, two) in enumerate(pairs) if one != two), len(golden))


def summary(
    way: StorageWay, model: PagedModel, tokens: int, settings: RestoreSettings, bootstrap: Bootstrap
) -> StorageResult:
    """What was found of one way, over all windows."""
    count, codec = way.found[0]["kl"].numel(), way.coder.codec
    window = np.repeat(np.arange(len(way.found)), count)
    position = np.tile(np.arange(count), len(way.found))
    kl = torch.cat([found["kl"] for found in way.found]).numpy()
    same = torch.cat([found["top1_ref"] == found["top1_alt"] for found in way.found]).double().numpy()
    return StorageResult(
        label=way.label,
        recipe=codec.recipe if codec else None,
        lossless=codec is None or codec.lossless,
        payload_bytes=way.payload_bytes,
        tokens=tokens,
        values=tokens * model.info.values_per_token,
        save_ms=tuple(way.save_ms),
        load_ms=tuple(way.load_ms),
        kl=bootstrap.divergence(Column.of(window, position, kl)),
        top1_agreement=bootstrap.rate(Column.of(window, position, same)),
        greedy=sum(way.greedy) / len(way.greedy),
        decode=settings.decode,
    )

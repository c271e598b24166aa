"""Measure every arm on the same windows and needles, its bytes and its speed, and the drafters; write the record."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import polars as pl
import torch
from tqdm import tqdm
from transformers import Cache

from kvlab.attention.hf import attending
from kvlab.attention.latent_svd import LatentMap, LatentMoments, attention_metric, fit
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.calibration import load as calibration
from kvlab.calibration.load import Calibrated, FittedFiles
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CapabilityError, UserError
from kvlab.core.machine import machine
from kvlab.core.model import ModelInfo, check_window, resolve
from kvlab.core.params import Params
from kvlab.core.records import Provenance, forget, write_json
from kvlab.engines.base import ContextCache
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.registry import start
from kvlab.measure import quick_run
from kvlab.measure.latent import CALIBRATING, moments_of
from kvlab.measure.mechanism import IN_16_BITS, mechanism_variant
from kvlab.measure.scoring import WindowRun
from kvlab.measure.variant import Variant, read_of
from kvlab.measure.windows import Window, windows_of
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.text import corpus, needles
from kvlab.text.needles import Needle
from kvlab.witness.plain import PlainModel
from kvlab_mechanisms.decoding.acceptance import acceptance, plain_texts
from kvlab_mechanisms.decoding.law import Sampling
from kvlab_pipeline.jobs.measure import provenance
from kvlab_pipeline.studies.tradeoffs.arms import CacheShape, TradeoffVariant, arms
from kvlab_pipeline.studies.tradeoffs.record import ArmFound, Drafted, TradeoffsRecord

DTYPE = "float32"
FIRST_NEEDLE = 1000  # their numbers begin here: no window of the text has them


@dataclass
class Bench:
    """What arms are measured with.

    Parameters
    ----------
    calibrated : Calibrated
        Of the codecs.
    moments : dict of int to LatentMoments
        That latents are fitted to, of calibration windows.
    """

    params: Params
    info: ModelInfo
    engine: HFEngine
    windows: list[Window]
    context: int
    calibrated: Calibrated
    moments: dict[int, LatentMoments]
    plain: Callable[[], PlainModel]


def refuse(params: Params) -> None:
    """See `measure`: what can be said before anything is loaded."""
    if torch.cuda.is_available():
        raise CapabilityError("tradeoffs times single steps on a CPU; run it where transformers finds no GPU")
    steps, scored = params.tradeoffs.steps, params.windows.eval
    if WARM + steps > scored:
        raise UserError(
            f"tradeoffs.steps is {steps}; allowed: at most {scored - WARM}, as windows.eval is {scored} and the"
            f" first {WARM} steps are not timed",
            code="user.too-many-steps",
        )


def measure(params: Params, windows_path: Path, texts: Path, fitted: FittedFiles, out: Path) -> None:
    """Measure what REPORT.md says; `params.tradeoffs` says of what.

    Raises
    ------
    CalibrationMismatch
        A calibration is another model's, or lacks what a codec reads.
    CapabilityError
        transformers would run on a GPU, which this study does not time.
    UserError
        Windows score too few tokens to time as many steps.
    CodecNotActive, Fault, WitnessDisagrees
        See `measure.quick_run`, and `acceptance`.
    """
    refuse(params)
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    found = corpus.load(windows_path, info.model_hash)
    calibrated = calibration.load(fitted, info.model_hash, found.corpus_hash, info)
    planted = planted_needles(params, texts)
    settings, longest = params.tradeoffs, max(len(needles.sequence(item)[0]) for item in planted)
    length = max(longest, found.context + found.eval + settings.tokens)
    check_window(info, length)
    forget(out)
    text = "other" if params.corpus.other else "test"
    scored = windows_of(found, text)[: settings.windows]
    with closing(start("hf", info, DTYPE, max_tokens=length)) as engine:
        moments = moments_of(engine, found.calib[:CALIBRATING].tolist())
        plain = cache(partial(PlainModel, info.path))
        bench = Bench(params, info, engine, scored, found.context, calibrated, moments, plain)
        record = recorded(bench, planted, provenance(info, found, {calibrated.origin: calibrated}))
    write_json(out, record.model_dump(mode="json"))


def planted_needles(params: Params, texts: Path) -> Sequence[Needle]:
    """As many retrieval items as are asked for here; those of the gate may be fewer."""
    wanted = params.mechanisms.model_copy(update={"needles": params.tradeoffs.needles})
    with tempfile.TemporaryDirectory() as folder:
        own = params.model_copy(update={"mechanisms": wanted})
        return needles.build(own, Path(folder) / "needles.parquet", texts).items


def recorded(bench: Bench, planted: Sequence[Needle], measured_on: Provenance) -> TradeoffsRecord:
    """Score, ask, time and draft."""
    params, info, context = bench.params, bench.info, bench.context
    listed = arms(params, CacheShape(info.n_layers, info.n_kv_heads, info.head_dim, context))
    bootstrap = Bootstrap(**params.stats.model_dump())
    rounding = quick_run.rounding(DTYPE)
    codecs = [quick_run.NamedCodec(arm.name, arm.recipe, bench.calibrated) for arm in listed if arm.family == "codec"]
    others = {
        arm.name: mechanism_variant(
            arm.asked, bench.engine, "snapshot", bench.moments, arm.recipe or IN_16_BITS, bench.calibrated
        )
        for arm in listed
        if arm.asked
    }
    rows = np.array([window.ids for window in bench.windows])
    speeds, drafts = timed(bench, listed, others), tuple(drafted(bench, bootstrap))
    floor, *scored = quick_run.score(
        bench.engine, rows, context, [rounding, *codecs], bench.plain, list(others.values())
    )
    found = dict(zip([*(one.label for one in codecs), *others], scored, strict=True))
    columns = {name: one.columns for name, one in found.items()}
    answers = needles_found(bench, planted, codecs, others)
    arms_found = [
        ArmFound(
            name=arm.name,
            family=arm.family,
            recipe_id=arm.recipe.recipe_id if arm.recipe else None,
            kl=bootstrap.divergence(columns[arm.name][0]),
            top1=bootstrap.rate(columns[arm.name][1]),
            found=bootstrap.rate(items(answers[arm.name])),
            stored=found[arm.name].cost.stored,
            read=found[arm.name].cost.read,
            per_second=speeds.get(arm.name),
            witnessed=found[arm.name].witnessed_kl,
        )
        for arm in listed
    ]
    leading = [one for one in arms_found if one.name.split()[0] == params.tradeoffs.codecs[0]]
    full = 2.0 * info.values_per_token
    return TradeoffsRecord(
        provenance=measured_on,
        machine=machine(),
        threads=torch.get_num_threads(),
        settings=params.tradeoffs,
        context=context,
        eval=len(bench.windows[0].ids) - context,
        values=info.values_per_token,
        text=bench.windows[0].text,
        confidence=params.stats.confidence,
        rounding=bootstrap.divergence(floor.columns[0]),
        full_read=read_of(full, context, len(bench.windows[0].ids), info),
        exact_found=bootstrap.rate(items(answers[quick_run.ROUNDING])),
        exact_per_second=speeds[quick_run.ROUNDING],
        arms=tuple(held_against(one, leading, columns, bootstrap) for one in arms_found),
        drafted=drafts,
    )


def needles_found(
    bench: Bench, planted: Sequence[Needle], codecs: Sequence[quick_run.NamedCodec], others: dict[str, Variant]
) -> dict[str, list[bool]]:
    """Which needles each arm finds, and the rounded cache: every token of the answer is the most likely one."""
    variants = {
        one.label: quick_run.codec_variant(one, bench.engine) for one in (quick_run.rounding(DTYPE), *codecs)
    } | others
    found: dict[str, list[bool]] = {name: [] for name in variants}
    for number, item in enumerate(tqdm(planted, desc="needles", unit="needle")):
        ids, place = needles.sequence(item)
        run = WindowRun(bench.engine, ids, len(item.context), FIRST_NEEDLE + number)
        for name, variant in variants.items():
            outcome = variant.measure(run)
            rows = run.rows(name, outcome.logits, outcome.reference).filter(pl.col("position") >= place)
            found[name].append(bool((rows["label"] == rows["top1_alt"]).all()))
    return found


def timed(bench: Bench, listed: Sequence[TradeoffVariant], others: dict[str, Variant]) -> dict[str, float]:
    """Tokens per second, by name, of the rounded cache's too; an arm without a form that runs here is left out."""
    engine, steps, window = bench.engine, bench.params.tradeoffs.steps, bench.windows[0]
    run = WindowRun(engine, list(window.ids), bench.context, window.number)
    over = partial(stepped, engine, run.ids, run.context, steps=steps)
    found = {quick_run.ROUNDING: over(cache=engine.filled(run.clean["pre_rope"].kept))}
    for arm in listed:
        if arm.family == "codec":
            found[arm.name] = of_codec(engine, run, arm, bench.calibrated, steps)
        elif arm.family == "eviction":
            coder = others[arm.name].coder
            found[arm.name] = over(cache=engine.filled(run.snapshot(coder.cell, coder)))
        elif arm.family == "sparse reading":
            found[arm.name] = of_pattern(engine, run, arm, steps)
        elif arm.family == "latent":
            maps = {layer: fit(one, arm.asked.rank, attention_metric(one)) for layer, one in bench.moments.items()}
            found[arm.name] = of_latents(engine, run, maps, steps)
    return found


def items(values: Sequence[float]) -> Column:
    """A number of each item, an item a window."""
    place = np.arange(len(values))
    return Column.of(place, place, np.array(values, dtype=np.float64))


def held_against(
    one: ArmFound, leading: Sequence[ArmFound], columns: dict[str, tuple[Column, Column]], bootstrap: Bootstrap
) -> ArmFound:
    """An arm with its difference to the widest leading codec that stores no more."""
    able = [rival for rival in leading if rival.stored <= one.stored and rival.name != one.name]
    if not able or one in leading:
        return one
    rival = max(able, key=lambda rival: rival.stored)
    difference = bootstrap.difference(columns[one.name][0], columns[rival.name][0])
    return one.model_copy(update={"rival": rival.name, "against": difference})


# Self-speculation: the model drafts over its coded cache, and the exact cache decides what is written.

GREEDY = Sampling(0.0)


def drafted(bench: Bench, bootstrap: Bootstrap) -> Iterator[Drafted]:
    """Every drafter at every width of `combined`, on the contexts of the first windows.

    Raises
    ------
    Fault
        A text is not the greedy one of the exact cache.
    """
    settings, model = bench.params.tradeoffs, bench.engine.model
    prompts = [list(window.ids[: bench.context]) for window in bench.windows[: settings.prompts]]
    began = perf_counter()
    greedy = plain_texts(model, prompts, settings.tokens, GREEDY)
    plain_seconds = perf_counter() - began
    written = settings.tokens * len(prompts)
    for codec in settings.drafters:
        for bits in settings.combined:
            recipe, runs = named_recipe(codec, bits, params=bench.params), []
            for prompt, text in zip(prompts, greedy, strict=True):
                runs.append(
                    acceptance(
                        model, [prompt], recipe, GREEDY, tokens=settings.tokens, draft=settings.draft,
                        calibration=bench.calibrated, greedy=[text],
                    )
                )  # fmt: skip
            shares = [sum(one.report.accepted) / sum(one.report.drafted) for one in runs]
            yield Drafted(
                name=f"{codec} {bits}",
                recipe_id=recipe.recipe_id,
                accepted=bootstrap.mean(items(shares)).within(0.0, 1.0),
                tokens_per_call=written / sum(len(one.report.accepted) for one in runs),
                draft=settings.draft,
                coded=float(np.mean([one.bits_per_value for one in runs])) * bench.info.values_per_token / 8,
                exact=2.0 * bench.info.values_per_token,
                per_second=written / sum(one.seconds for one in runs),
                plain_per_second=written / plain_seconds,
            )


# Seconds of one written token over each kind of cache, as it can be run here: one at a time, on this machine.

WARM = 2  # steps before any is timed


@torch.inference_mode()
def stepped(engine: HFEngine, ids: Sequence[int], context: int, cache: Cache, steps: int) -> float:
    """Tokens per second of a loop that feeds one token after a context at a time; of the median step."""
    took = []
    for place in range(context, context + WARM + steps):
        given = torch.tensor([[ids[place]]], device=engine.model.device)
        at = torch.tensor([[place]], device=engine.model.device)
        began = perf_counter()
        engine.model(given, past_key_values=cache, position_ids=at, use_cache=True)
        took.append(perf_counter() - began)
    return 1 / median(took[WARM:])


def of_codec(engine: HFEngine, run: WindowRun, arm: TradeoffVariant, calibrated: Calibrated, steps: int) -> float:
    """Over `KVCache`, which decodes what is coded in each step."""
    cache = KVCache(engine.model, arm.recipe, calibrated, "serving")
    with torch.inference_mode():
        engine.model(torch.tensor([run.ids[: run.context]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return stepped(engine, run.ids, run.context, cache, steps)


def of_pattern(engine: HFEngine, run: WindowRun, arm: TradeoffVariant, steps: int) -> float:
    """Reading by a pattern, by the executor that transformers runs here: it masks, and computes all scores."""
    cache = engine.filled(run.clean["pre_rope"].kept)
    with attending(engine.model, arm.asked.plan(engine.info.n_layers, run.context)):
        return stepped(engine, run.ids, run.context, cache, steps)


@torch.inference_mode()
def of_latents(engine: HFEngine, run: WindowRun, maps: dict[int, LatentMap], steps: int) -> float:
    """K and V of the whole context made anew from latents in every step, as a rotary embedding asks for."""
    kept = run.clean["pre_rope"].kept
    held = {layer: one.latents(kept[layer, "k"], kept[layer, "v"]).float() for layer, one in maps.items()}
    quick = {layer: (one.up.float().T, one.mean.float(), one.kv_heads) for layer, one in maps.items()}
    took = []
    for _ in range(WARM + steps):
        given = torch.tensor([[run.ids[run.context]]])
        began = perf_counter()
        cache = engine.filled(_restored(held, quick))
        engine.model(given, past_key_values=cache, use_cache=True)
        took.append(perf_counter() - began)
    return 1 / median(took[WARM:])


def _restored(held: dict[int, torch.Tensor], quick: dict) -> ContextCache:
    made = {}
    for layer, (up, mean, heads) in quick.items():
        kv = torch.addmm(mean, held[layer], up).unflatten(1, (2, heads, -1)).permute(1, 2, 0, 3)
        made[layer, "k"], made[layer, "v"] = kv
    return made

"""Seconds of one written token over each kind of cache, as it can be run here: one at a time, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch
from transformers import Cache

from kvlab.attention.hf import attending
from kvlab.attention.latent_svd import LatentMap
from kvlab.cache.hf_cache import KVCache
from kvlab.calibration.load import Calibrated
from kvlab.engines.base import ContextCache
from kvlab.engines.hf import HFEngine
from kvlab.measure.mechanism import Applied
from kvlab.measure.scoring import WindowRun
from kvlab_pipeline.studies.tradeoffs.arms import Arm

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


def of_exact(engine: HFEngine, run: WindowRun, steps: int) -> float:
    """Over the untouched cache."""
    return stepped(engine, run.ids, run.context, engine.filled(run.clean["pre_rope"].kept), steps)


def of_codec(engine: HFEngine, run: WindowRun, arm: Arm, calibrated: Calibrated, steps: int) -> float:
    """Over `KVCache`, which decodes what is coded in each step."""
    cache = KVCache(engine.model, arm.recipe, calibrated, "serving")
    with torch.inference_mode():
        engine.model(torch.tensor([run.ids[: run.context]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return stepped(engine, run.ids, run.context, cache, steps)


def of_eviction(engine: HFEngine, run: WindowRun, subject: Applied, steps: int) -> float:
    """Over what is left."""
    return stepped(engine, run.ids, run.context, engine.filled(subject.keeps(run)), steps)


def of_pattern(engine: HFEngine, run: WindowRun, arm: Arm, steps: int) -> float:
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

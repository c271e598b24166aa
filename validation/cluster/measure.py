"""Collectives between ranks, and hand-overs from prefill to decode, held against one process before they are timed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvlab.cli.checked import config_of, info_of
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import Fault, UserError
from kvlab.core.machine import cpu_name
from kvlab.core.records import versions
from kvlab.stats.divergences import token_record
from kvlab_mechanisms.cluster.decoding import WAYS, DecodeProcess, Setup
from kvlab_mechanisms.cluster.handover import CodedWire, DecodingWorker, Exact, Prefilled, prefill
from kvlab_mechanisms.cluster.ranks import run
from kvlab_mechanisms.micro.collectives import ROUNDS, collectives, median

STEPS = 8  # tokens that are decoded after a hand-over
VLLM_SECONDS = 300


def measure(folder: Path, codecs: Sequence[str], tokens: Sequence[int], world: int, with_vllm: bool) -> dict[str, Any]:
    """All of it, as plain data; `Fault` where an answer is not that of one process."""
    torch.set_num_threads(1)
    recipes = {"exact": None} | {name: _recipe(name) for name in codecs}
    config_of(folder)
    info = info_of(folder)
    prompts = {count: _prompt(count, info.vocab_size) for count in tokens}
    found = {
        "model": info.slug,
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "versions": versions(),
        "world": world,
        "collectives": run(world, collectives)[0],
        "handovers": [
            row for name, one in recipes.items() for row in handovers(Setup(info, recipe=one), name, prompts)
        ],
        "vllm": connector(folder, tokens) if with_vllm else {"reason": "it was left out"},
    }
    return found


def _recipe(asked: str):
    name, _, bits = asked.partition("=")
    if not bits.isdecimal():
        raise UserError(f"codec {asked!r} is not understood; allowed: NAME=BITS", code="user.codec-not-understood")
    return named_recipe(name, int(bits))


def _prompt(count: int, vocabulary: int) -> list[int]:
    return torch.randint(5, vocabulary, (count,), generator=torch.Generator().manual_seed(count)).tolist()


# ------------------------------------------------------------------------------------------ hand-overs


def handovers(setup: Setup, name: str, prompts: dict[int, list[int]]) -> list[dict[str, Any]]:
    """One codec, every prompt, every way."""
    model = setup.model()
    form = setup.form(model)
    found = []
    with DecodeProcess(setup, form) as process:
        for count, prompt in prompts.items():
            read = prefill(model, prompt)
            exact = {place: x.clone() for place, x in Exact().payloads(read.cache)}
            inside = form.round_trip(read.cache, model.dtype) if isinstance(form, CodedWire) else exact
            plain = _steps(DecodingWorker(model), read, exact)
            wanted = _steps(DecodingWorker(model), read, inside, plain[0])
            prefill_seconds = median(lambda prompt=prompt: prefill(model, prompt))
            for way in WAYS:
                row = {"codec": name, "tokens": count, "way": way, "prefill_ms": prefill_seconds * 1e3}
                kl = _checked(process, read, way, plain, wanted)
                found.append(row | {"kl": kl} | _timed(process, read, way))
    return found


def _steps(
    decoder: DecodingWorker, read: Prefilled, cache, forced: list[int] | None = None
) -> tuple[list[int], torch.Tensor]:
    """Tokens and their logits, over a cache in this process."""
    decoder.load("one", {place: x.clone() for place, x in cache.items()}, read.first)
    given = [read.first, *(forced or [])]
    tokens, logits = [], []
    for number in range(STEPS):
        token, row = decoder.step("one", given[number] if number < len(given) else None)
        tokens.append(token)
        logits.append(row)
    return tokens, torch.stack(logits)


def _checked(process: DecodeProcess, read: Prefilled, way, plain, wanted) -> float:
    """Mean KL to one process without a codec, nats; `Fault` unless it is that of the codec in one process."""
    process.hand_over("checked", read, way)
    given = [read.first, *plain[0]]
    logits = torch.stack([process.step("checked", token)[1] for token in given[:STEPS]])
    process.unload("checked")
    if not torch.equal(logits, wanted[1]):
        raise Fault(f"what was handed over by {way} gives other logits than the same cache in one process")
    return float(token_record(plain[1], logits, torch.tensor(plain[0]))["kl"].mean())


def _timed(process: DecodeProcess, read: Prefilled, way) -> dict[str, float]:
    """Bytes and milliseconds of a hand-over, and of a step there."""
    handed = []
    for number in range(ROUNDS):
        handed.append(process.hand_over(str(number), read, way))
        if number < ROUNDS - 1:
            process.unload(str(number))
    step = median(lambda: process.step(str(ROUNDS - 1)))
    process.unload(str(ROUNDS - 1))
    seconds = statistics.median(one.seconds for one in handed)
    return {"bytes": handed[0].nbytes, "handover_ms": seconds * 1e3, "step_ms": step * 1e3}


def connector(folder: Path, tokens: Sequence[int]) -> dict[str, Any]:
    """vLLM's own connector on the same model in a process of its own, or the reason why it did not run."""
    command = [sys.executable, "-m", "validation.cluster.vllm_connector", str(folder), *map(str, tokens)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VLLM_SECONDS)
    except subprocess.TimeoutExpired:
        return {"reason": f"it did not end within {VLLM_SECONDS} s"}
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    return {"rows": json.loads(done.stdout.strip().splitlines()[-1])}

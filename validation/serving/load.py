"""What a smaller cache buys under load: steps measured on vLLM, workers simulated -> LOAD.md and steps.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.core.errors import CapabilityError
from kvlab.core.machine import machine
from kvlab.core.origin import told_of
from kvlab.core.records import read_json, versions, write_json
from kvlab_mechanisms.serving.arrivals import AZURE_CONV, made, scaled
from kvlab_mechanisms.serving.measured import ServedVariant, arm_of, rows_of
from kvlab_mechanisms.serving.policies.gateway import Gateway
from kvlab_mechanisms.serving.simulate import SimulatedRun, Slo, simulate
from kvlab_mechanisms.serving.trace import Trace, columns
from kvlab_mechanisms.serving.worker import Worker, WorkerShape
from validation.serving import load_page
from validation.serving.served import held_against_server

MEMORY = 1 << 28  # bytes of an engine's cache while its steps are measured
CHUNK, MOST, LONGEST = 512, 32, 1024
VOCABULARY = 40_000
LIMIT = 24.0  # seconds of the processor for the steps of one engine
SLO = Slo(ttft=10.0, tpot=0.5)
WORKERS = (1, 10, 100, 1000)
MEMORIES = (8 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20)  # bytes of KV of one worker
RATES = tuple(0.05 * 2 ** (step / 2) for step in range(14))  # requests per second and worker
REQUESTS = 400  # of one worker; more workers have as many each
HELD, HELD_RATE = 500, 5.0  # of the run that the simulator is held against


def study(model: Path, recipes: list[Path], out: Path) -> None:
    """Measure each kind of cache, simulate it, and write all that was found.

    Raises
    ------
    CapabilityError
        An engine, or the server, does not start.
    Fault
        The server fails a request.
    """
    arms = {"bf16": "auto", "fp8_e4m3": "fp8_e4m3"} | {path.stem: str(Path(path).absolute()) for path in recipes}
    found = {name: run(task(model, cache, name == "bf16"), name) for name, cache in arms.items()}
    assemble(model, found, held_against_server(model), out)


def assemble(model: Path, found: dict[str, dict], served: list[dict], out: Path) -> None:
    """Fit, simulate and write up what was measured, by kind of cache, and what `vllm serve` showed."""
    fitted = {name: arm_of(one["fit"]["steps"], MEMORY, one["tokens"], one["block"]) for name, one in found.items()}
    data = {
        "model": {"name": model.name, "disclosure": told_of(model)},
        "machine": machine(),
        "versions": versions(),
        "load": os.getloadavg()[0],
        "arms": {name: one.model_dump() for name, one in fitted.items()},
        "single": {name: best_rates(one) for name, one in fitted.items()},
        "many": {name: by_workers(one) for name, one in fitted.items()},
        "held": {name: held_against(one, fitted[name]) for name, one in found.items() if "held" in one},
        "served": served,
        "slo": {"ttft": SLO.ttft, "tpot": SLO.tpot},
    }
    write_json(out / "steps.json", {name: data[name] for name in ("model", "machine", "versions", "arms")})
    write_json(out / "load.json", data)
    load_page.write(read_json(out / "load.json"), out)


# ------------------------------------------------------------------------------ measured


def task(model: Path, cache: str, held: bool) -> dict[str, Any]:
    """What an engine is asked: requests one by one, then a crowd; 500 more as they come where it is to be `held`."""
    chance = np.random.default_rng(11)
    lengths = zip(chance.integers(16, 500, 6), chance.integers(4, 12, 6), strict=True)
    fit = [request(chance, 0.7 * i, *both) for i, both in enumerate(lengths)]
    prompts, answers = chance.lognormal(4.4, 0.8, 60).clip(8, 500), chance.lognormal(2.6, 0.7, 60).clip(2, 60)
    fit += [request(chance, 5 + 0.12 * i, *both) for i, both in enumerate(zip(prompts, answers, strict=True))]
    warm = [request(chance, 0, 40, 3), request(chance, 0, 90, 2)]
    return {
        **{"model": str(model), "cache": cache, "dtype": "bfloat16", "bytes": MEMORY, "longest": LONGEST},
        **{"prefix_caching": False, "chunk": CHUNK, "most": MOST, "warm": warm},
        "loads": {"fit": fit} | ({"held": arriving()} if held else {}),
        "limit": 10 * LIMIT if held else LIMIT,
    }


def arriving() -> list[dict]:
    """Requests of a Poisson process, of lognormal lengths about 100 and 24 tokens."""
    chance, t, found = np.random.default_rng(77), 0.0, []
    for _ in range(HELD):
        t += float(chance.exponential(1 / HELD_RATE))
        prompt, answer = chance.lognormal(np.log(100), 0.8), chance.lognormal(np.log(24), 0.7)
        found.append(request(chance, t, min(max(prompt, 4), 700), min(max(answer, 2), 200)))
    return found


def request(chance: np.random.Generator, t: float, prompt: float, output: float) -> dict:
    """A request of random tokens."""
    return {"t": t, "ids": chance.integers(100, VOCABULARY, int(prompt)).tolist(), "output": int(output)}


def run(asked: dict[str, Any], name: str) -> dict[str, Any]:
    """What one engine shows in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(asked))
        done = subprocess.run(
            [sys.executable, "-m", "validation.serving.steps", path],
            capture_output=True,
            text=True,
            env={key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "KVLAB_"))},
        )
    return answer(done.stdout) or refuse(name, done.stderr)


def answer(text: str) -> dict[str, Any] | None:
    """The line of an engine's output that holds what it showed."""
    lines = [line for line in text.splitlines() if line.startswith("ANSWER ")]
    return json.loads(lines[-1].removeprefix("ANSWER ")) if lines else None


def refuse(name: str, said: str) -> dict[str, Any]:
    """Raise with the engine's own last words."""
    errors = [line for line in said.splitlines() if "Error" in line]
    raise CapabilityError(f"{name}: {errors[-1].strip()[:200] if errors else 'the engine ended without an answer'}")


# ------------------------------------------------------------------------------ simulated


def azure_like(rate: float, workers: int = 1, requests: int = REQUESTS) -> Trace:
    """So many requests per second and worker in the mean over seeds; this one's own rate is the trace's `rate`."""
    return made(requests * workers, scaled(AZURE_CONV, 0.1, rate=rate * workers), seed=5)


def served(arm: ServedVariant, rate: float, memory: int, workers: int = 1, requests: int = REQUESTS) -> SimulatedRun:
    """A load of so many requests per second and worker."""
    trace = azure_like(rate, workers, requests)
    shape = WorkerShape(memory, arm.token_bytes, 16, CHUNK, MOST)
    gateway = Gateway("least")
    for number in range(workers):
        gateway.register(number)
    return simulate(trace, [Worker(arm.costs, shape) for _ in range(workers)], gateway)


def best_rates(arm: ServedVariant) -> list[dict]:
    """By memory: the load at which most requests a second are in time, and what is seen there."""
    found = []
    for memory in MEMORIES:
        runs = {rate: served(arm, rate, memory) for rate in RATES}
        rate = max(RATES, key=lambda rate: runs[rate].goodput(SLO))
        found.append({"memory": memory, "rate": rate, "arrived": azure_like(rate).rate} | runs[rate].report(SLO))
    return found


def by_workers(arm: ServedVariant) -> list[dict]:
    """By the number of workers, at one load for each of them and the middle memory."""
    memory = MEMORIES[1]
    rate = max(RATES, key=lambda rate: served(arm, rate, memory).goodput(SLO))
    return [{"memory": memory, "rate": rate} | served(arm, rate, memory, n, 200).report(SLO) for n in WORKERS]


def held_against(one: dict, arm: ServedVariant) -> dict:
    """The simulator beside the engine, on the same requests."""
    asked = [ask for ask in one["held"]["requests"] if "last" in ask]
    trace = columns((ask["t"], ask["prompt"], ask["output"], -1, 0) for ask in asked)
    shape = WorkerShape(MEMORY, arm.token_bytes, one["block"], CHUNK, MOST, prefixes=False)
    found = simulate(trace, [Worker(arm.costs, shape)])
    first = np.array([ask["first"] - ask["t"] for ask in asked])
    after = np.array([(ask["last"] - ask["first"]) / max(ask["output"] - 1, 1) for ask in asked])[trace.output > 1]
    span = max(ask["last"] for ask in asked) - float(trace.t[0])
    steps = one["held"]["steps"]
    seconds = sum(step["seconds"] for step in steps)
    tpot = found.tpot[trace.output > 1]
    return {
        "requests": len(asked),
        "steps": len(steps),
        "steps_ratio": float((rows_of(steps, arm.token_bytes) @ np.array(arm.seconds)).sum()) / seconds,
        "tokens_per_s": [int(trace.output.sum()) / span, found.tokens / found.span],
        "ttft_p50": [float(np.median(first)), float(np.median(found.ttft))],
        "ttft_p99": [float(np.percentile(first, 99)), float(np.percentile(found.ttft, 99))],
        "tpot_p50": [float(np.median(after)), float(np.median(tpot))],
        "tpot_p99": [float(np.percentile(after, 99)), float(np.percentile(tpot, 99))],
        "preemptions": [one["held"]["preemptions"], found.preemptions],
    }

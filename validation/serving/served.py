"""The simulator held against `vllm serve`: a client asks a real server, and policies pace both.

First controlled requests show what the server's steps take as a client sees them: a prompt's time to its first token,
the gaps between tokens while a known number of sequences decode, and the one gap in which a prompt is read beside them.
Then a trace goes to the server over HTTP, paced by a rate limit, a gateway that turns away who finds it full, and the
shortest request first; the simulator is given the times at which requests really came, and the same policies.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep

import httpx
import numpy as np

from kvlab.core.errors import CapabilityError, Fault
from kvlab_mechanisms.serving.arrivals import AZURE_CONV, made, scaled
from kvlab_mechanisms.serving.measured import ServedVariant, arm_of
from kvlab_mechanisms.serving.paced import ClientTimes, pace
from kvlab_mechanisms.serving.policies.gateway import Gateway
from kvlab_mechanisms.serving.policies.preempt import remaining_first
from kvlab_mechanisms.serving.policies.ratelimit import NANO, RateLimit
from kvlab_mechanisms.serving.simulate import Front, SimulatedRun, simulate
from kvlab_mechanisms.serving.trace import Trace
from kvlab_mechanisms.serving.worker import Job, Order, Worker, WorkerShape

MEMORY, CHUNK, MOST, LONGEST, PAGE = 1 << 28, 512, 32, 1024, 16
PATIENCE = 300  # seconds that a start may take
PROMPTS = (16, 40, 80, 140, 220, 320, 480)  # of requests that are alone
GROUPS = (1, 2, 4, 8)  # sequences that decode together
LENGTHS, ANSWER = (20, 120, 300), 24  # prompts of a group, and tokens of each answer
JOINED = (20, 60, 160)  # prompts that come while a group decodes
REQUESTS = 560
BUSY = 0.8  # of the worker's time, by the simulator, at the first load
LOADS = (1.0, 2.5)  # times that load: one that is served as it comes, and one that nobody could serve
SLOTS = 8  # requests that the server is asked for at once
FULL = 16  # requests that the gateway lets in at most, those that wait among them
LIMIT, BURST = 1.0, 8  # of the mean tokens per second, and of a mean request's
RATES = tuple(0.05 * 2 ** (step / 4) for step in range(36))  # requests per second
VOCABULARY = 40_000


def held_against_server(model: Path) -> list[dict]:
    """What a server and the simulator make of the same requests, at each load.

    Raises
    ------
    CapabilityError
        The server does not start.
    Fault
        It fails a request, or answers with another number of tokens.
    """
    with tempfile.TemporaryDirectory() as folder, server(model, Path(folder) / "log") as address:
        arm, found = arm_of(asyncio.run(steps(address)), MEMORY, capacity(address), PAGE), []
        rate = min(RATES, key=lambda rate: abs(simulated(at_rate(rate), arm).busy - BUSY))
        for times in LOADS:
            trace = at_rate(times * rate)
            seen = asyncio.run(served(address, trace, arm))
            if seen.failed:
                number, why = seen.failed[0]
                raise Fault(
                    f"vllm serve failed {len(seen.failed)} of {len(seen.came)} requests, the first is {number}: {why}"
                )
            found.append(compared(trace, seen, simulated(replace(trace, t=seen.came), arm), arm))
    return found


# ------------------------------------------------------------------------------ the server


@contextmanager
def server(model: Path, log: Path) -> Iterator[str]:
    """The address of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVLAB_"))}
    own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    settings = ["--model", model, "--served-model-name", "model", "--dtype", "bfloat16", "--enforce-eager"]
    settings += ["--kv-cache-memory-bytes", MEMORY, "--max-model-len", LONGEST, "--max-num-batched-tokens", CHUNK]
    settings += ["--max-num-seqs", MOST, "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", port]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, settings)]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=clean | own) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    """Until the server answers; `CapabilityError` with its last words where it ends or takes too long."""
    end = monotonic() + PATIENCE
    while True:
        try:
            if httpx.get(f"{address}/health").status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None or monotonic() > end:
            said = [line for line in log.read_text().splitlines() if "Error" in line]
            raise CapabilityError(f"vllm serve: {said[-1].strip()[:200] if said else 'it did not get ready'}")
        sleep(0.5)


def capacity(address: str) -> int:
    """Tokens that the server's cache holds, by its own count."""
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        if line.startswith("vllm:cache_config_info"):
            told = dict(pair.split("=", 1) for pair in line.partition("{")[2].partition("}")[0].split(","))
            return int(told["num_gpu_blocks"].strip('"')) * int(told["block_size"].strip('"'))
    raise Fault("vllm serve does not say how many blocks its cache has")


async def asked(client: httpx.AsyncClient, address: str, prompt: list[int], output: int) -> AsyncIterator[None]:
    """Yields whenever tokens of an answer come."""
    body = {"model": "model", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    written = None
    async with client.stream("POST", f"{address}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            told = json.loads(line.removeprefix("data: "))
            if told["choices"]:
                yield
            written = (told.get("usage") or {}).get("completion_tokens", written)
    if written != output:
        raise Fault(f"{written} tokens came, {output} were asked for")


def connected() -> httpx.AsyncClient:
    """A client that waits as long as it takes."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


# ------------------------------------------------------------------------------ what its steps take


async def steps(address: str) -> list[dict]:
    """Rows of `arm_of`: first tokens of requests that are alone, and gaps of groups that decode together."""
    chance, found = np.random.default_rng(3), []
    async with connected() as client:
        for warm in (40, 300):
            await times(client, address, drawn(chance, warm), 4)
        for prompt in PROMPTS * 2:
            sent = monotonic()
            first, *_ = await times(client, address, drawn(chance, prompt), 1)
            found.append(row(first - sent, prefill=prompt, pairs=prompt * (prompt + 1) / 2))
        for size in GROUPS:
            for length in LENGTHS:
                found += await together(client, address, [drawn(chance, length) for _ in range(size)])
            for length in JOINED:
                found += await joined(client, address, drawn(chance, length), [drawn(chance, 60)] * size)
    return found


async def joined(client: httpx.AsyncClient, address: str, prompt: list[int], others: list[list[int]]) -> list[dict]:
    """The step that reads a prompt while others decode: it ends with a token of all of them; none if they were done."""
    begun = [asyncio.Event() for _ in others]
    asks = (times(client, address, one, 3 * ANSWER, event) for one, event in zip(others, begun, strict=True))
    group = asyncio.gather(*asks)
    await asyncio.gather(*(event.wait() for event in begun))
    first, *_ = await times(client, address, prompt, 1)
    came = await group
    if first > min(one[-1] for one in came):
        return []
    ends = [min(range(1, len(one)), key=lambda place, one=one: abs(one[place] - first)) for one in came]
    gap = max(one[end] - one[end - 1] for one, end in zip(came, ends, strict=True))
    pairs, read = len(prompt) * (len(prompt) + 1) / 2, sum(map(len, others)) + sum(ends)
    return [row(gap, prefill=len(prompt), pairs=pairs, decodes=len(others), read=read)]


async def together(client: httpx.AsyncClient, address: str, prompts: list[list[int]]) -> list[dict]:
    """Gaps between tokens of the last to begin, while all of a group decode."""
    came = await asyncio.gather(*(times(client, address, prompt, ANSWER + len(prompts)) for prompt in prompts))
    begun, ended = max(one[0] for one in came), min(one[-1] for one in came)
    last = max(came, key=lambda one: one[0])
    read, size = sum(map(len, prompts)), len(prompts)
    gaps = [(b - a, place) for place, (a, b) in enumerate(pairwise(last), 2)]
    whole = [(gap, place) for (gap, place), at in zip(gaps, last[1:], strict=True) if begun < at <= ended]
    return [row(gap, decodes=size, read=read + size * place) for gap, place in whole]


def row(seconds: float, prefill: int = 0, pairs: float = 0.0, decodes: int = 0, read: int = 0) -> dict:
    """A step, by what was in it."""
    return {"seconds": seconds, "prefill": prefill, "pairs": pairs, "decodes": decodes, "read": read}


async def times(
    client: httpx.AsyncClient, address: str, prompt: list[int], output: int, begun: asyncio.Event | None = None
) -> list[float]:
    """When tokens came; `begun` is set at the first."""
    found = []
    async for _ in asked(client, address, prompt, output):
        found.append(monotonic())
        if begun:
            begun.set()
    return found


def drawn(chance: np.random.Generator, tokens: int) -> list[int]:
    """A prompt of random tokens."""
    return chance.integers(100, VOCABULARY, tokens).tolist()


# ------------------------------------------------------------------------------ the load, and who paces it


def at_rate(rate: float) -> Trace:
    """Requests with the statistics of Azure's conversations, none of them longer than the server takes."""
    found = made(REQUESTS, scaled(AZURE_CONV, 0.1, rate=rate), seed=9)
    output = np.minimum(found.output, LONGEST // 4)
    return replace(found, prompt=np.minimum(found.prompt, LONGEST - LONGEST // 4 - 1), output=output)


def gateway() -> Gateway:
    """One worker, which lets in no more than there is room for."""
    found = Gateway("least")
    found.register(0, capacity=FULL)
    return found


def front(trace: Trace) -> Front:
    """So many tokens a second, of prompts and answers; who comes when they are used up is turned away."""
    tokens = trace.prompt + trace.output
    mean = float(tokens.mean())
    limit = RateLimit(max(1, round(LIMIT * trace.rate * mean)), max(int(tokens.max()), round(BURST * mean)))
    return lambda t, number: limit.consume("all", int(tokens[number]), round(t * NANO)).allowed


def order(arm: ServedVariant) -> Order:
    """Least work first."""
    costs = arm.costs

    def work(job: Job) -> float:
        return costs.prompt(job.prompt, CHUNK) + costs.steps(job.output, 1, job.prompt)

    return remaining_first(work, ageing=0.1)


async def served(address: str, trace: Trace, arm: ServedVariant) -> ClientTimes:
    """The trace, sent to the server."""
    chance = np.random.default_rng(5)
    prompts = [drawn(chance, tokens) for tokens in trace.prompt]
    async with connected() as client:

        def ask(_worker: int, number: int) -> AsyncIterator[None]:
            return asked(client, address, prompts[number], int(trace.output[number]))

        return await pace(trace, ask, 1, SLOTS, gateway(), front(trace), order(arm))


def simulated(trace: Trace, arm: ServedVariant) -> SimulatedRun:
    """The trace, simulated."""
    shape = WorkerShape(MEMORY, arm.token_bytes, PAGE, CHUNK, SLOTS, prefixes=False)
    return simulate(trace, [Worker(arm.costs, shape, order(arm))], gateway(), front(trace))


# ------------------------------------------------------------------------------ beside one another


def compared(trace: Trace, seen: ClientTimes, due: SimulatedRun, arm: ServedVariant) -> dict:
    """Figures of the server's run, each beside the simulator's."""
    both = {
        "tokens_per_s": [seen.tokens_per_s, due.tokens / due.span],
        "denied": [int(seen.denied.sum()), due.denied],
    }
    for name in ("ttft", "tpot"):
        pair = [one[~np.isnan(one)] for one in (getattr(seen, name), getattr(due, name))]
        both |= {f"{name}_p{rank}": [float(np.percentile(one, rank)) for one in pair] for rank in (50, 99)}
    done = int((~np.isnan(seen.last)).sum())
    return both | {
        "requests": done,
        "rate": trace.rate,
        "busy": due.busy,
        "slots": SLOTS,
        "full": FULL,
        "arm": arm.model_dump(),
    }

"""`kvlab simulate`: a trace of requests served by simulated workers. Heavy imports happen inside."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from kvlab.cli.flags import EVERYTHING, choice, number, path, whole, word
from kvlab.core.errors import UserError, suggestion
from kvlab.output.terminal import as_text

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
TARGETS = ("ttft", "tpot")
COLUMNS = (
    *("codec", "tokens held", "requests/s", "goodput/s", "in time, %", "TTFT p50", "p99", "TPOT p50", "p99 "),
    *("preempted", "busy, %"),
)
MOST_WORKERS = 100_000


def simulate_verb(
    trace: Annotated[str, word("a file, azure-conv or azure-code", argument=True, metavar="TRACE")],
    measured: Annotated[Path, path("what steps took; default: results/serving/steps.json")] = Path(
        "results/serving/steps.json"
    ),
    codec: Annotated[list[str], word("of --measured; several may be named; default: all", metavar="CODEC ...")] = (),
    workers: Annotated[int, number("default: 1", whole(1))] = 1,
    memory: Annotated[str, word("of KV pages of a worker, as 512MiB; default: 1GiB", metavar="SIZE")] = "1GiB",
    slo: Annotated[str, word("targets in seconds, as ttft=1,tpot=0.1; default: none", metavar="TARGETS")] = "",
    rate: Annotated[float | None, number("requests per second; default: the trace's own", float, metavar="R")] = None,
    requests: Annotated[int, number("of a made trace; default: 10000", whole(1))] = 10000,
    lengths: Annotated[
        float, number("of a made trace, times the published ones; default: 1", float, metavar="F")
    ] = 1.0,
    seed: Annotated[int, number("of a made trace; default: 0", whole(0))] = 0,
    gateway: Annotated[str, choice("default: least", ("least", "two", "prefix"))] = "least",
    chunk: Annotated[int, number("tokens of a step; default: 512", whole(1))] = 512,
    most: Annotated[int, number("sequences of a worker at once; default: 64", whole(1))] = 64,
    swap: Annotated[
        int | None,
        number(
            "bytes per second to the host's memory; default: preempted ones are computed again", whole(1), metavar="B"
        ),
    ] = None,
    json: Annotated[Path | None, EVERYTHING] = None,
) -> None:
    """Serve a trace of requests on simulated workers: what a smaller cache buys in time.

    TRACE is a file (kvlab's JSON Lines, Azure's CSV, Mooncake's JSON Lines) or the name of published statistics,
    azure-conv or azure-code, of which --requests are made. --measured holds what steps took, by the kind of cache.

      kvlab simulate azure-conv --lengths 0.1 --rate 2 --codec bf16 klt4 --memory 64MiB --slo ttft=5,tpot=0.5
    """
    args = SimpleNamespace(**locals())  # what was asked for, for the functions below

    from kvlab.cli import checked
    from kvlab_mechanisms.serving.measured import arm_named, read_measured

    wanted, held = targets(slo), size(memory)
    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers {workers}; allowed: from 1 to {MOST_WORKERS}")
    arms = read_measured(measured)
    named = {name: arm_named(arms, name) for name in dict.fromkeys(codec or arms)}
    checked.writable(json)
    arrived = requested(args)
    found = {name: _served(arrived, arm, held, wanted, args) for name, arm in named.items()}
    if json:
        from kvlab.core.records import write_json

        write_json(json, {"trace": trace, "memory": held, "chunk": chunk, "arms": found})
    print("\n".join(report_lines(args, arrived, found)))


def requested(args: SimpleNamespace):
    """The trace that is asked for, at the rate that is asked for."""
    from kvlab_mechanisms.serving import arrivals
    from kvlab_mechanisms.serving.trace import read_any

    if args.rate is not None and not 0 < args.rate < math.inf:
        raise UserError(f"--rate {args.rate:g}; allowed: above 0 requests per second")
    if not 0 < args.lengths <= 1000:
        raise UserError(f"--lengths {args.lengths:g}; allowed: above 0, at most 1000")
    if args.trace in arrivals.PUBLISHED:
        own = arrivals.scaled(arrivals.PUBLISHED[args.trace], args.lengths)
        found = arrivals.made(args.requests, own, args.seed)
    elif not Path(args.trace).is_file():
        hint = suggestion(args.trace, arrivals.PUBLISHED)
        raise UserError(f"TRACE {args.trace!r} is no file; allowed: a file, {', '.join(arrivals.PUBLISHED)}{hint}")
    else:
        found = read_any(args.trace)
    if args.rate is None:
        return found
    if not (len(found) > 1 and math.isfinite(found.rate)):
        raise UserError(f"--rate {args.rate:g} of a trace whose requests come all at once; allowed: one with a rate")
    return found.at_rate(args.rate)


def _served(trace, arm, memory: int, slo, args: SimpleNamespace) -> dict:
    from kvlab_mechanisms.serving.policies.gateway import Gateway
    from kvlab_mechanisms.serving.policies.preempt import Switch
    from kvlab_mechanisms.serving.simulate import simulate
    from kvlab_mechanisms.serving.worker import Worker, WorkerShape

    shape = WorkerShape(memory, arm.token_bytes, arm.page, args.chunk, args.most)
    swap = Switch(arm.costs, args.chunk, arm.token_bytes, args.swap) if args.swap else None
    workers = [Worker(arm.costs, shape, swap=swap) for _ in range(args.workers)]
    gateway = Gateway(args.gateway)
    for worker in range(args.workers):
        gateway.register(worker)
    served = simulate(trace, workers, gateway)
    return served.report(slo) | {"token_bytes": arm.token_bytes}


def targets(text: str):
    """``ttft=1,tpot=0.1`` as targets."""
    from kvlab_mechanisms.serving.simulate import Slo

    found = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in TARGETS:
            raise UserError(f"--slo {name!r} is not known; allowed: {', '.join(TARGETS)}{suggestion(name, TARGETS)}")
        if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", number) or name in found:
            raise UserError(f"--slo {part!r}; allowed: seconds, once for each, as ttft=1,tpot=0.1")
        found[name] = float(number)
    return Slo(**found)


def size(text: str) -> int:
    """``1.5GiB`` as bytes."""
    parts = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text, re.ASCII)
    if not parts or parts[2] not in UNITS or float(parts[1]) <= 0:
        raise UserError(f"--memory {text!r}; allowed: bytes above 0, as 512MiB or 1.5GiB")
    return int(float(parts[1]) * UNITS[parts[2]])


def report_lines(args: SimpleNamespace, trace, found: dict) -> Iterator[str]:
    """What was found, for people."""
    workers = "1 worker" if args.workers == 1 else f"{args.workers} workers"
    yield f"{args.trace}: {len(trace)} requests, {trace.rate:.4g} a second, on {workers} with {args.memory} of KV each"
    yield f"targets: {args.slo}; seconds"
    yield ""
    yield as_text([_row(name, one) for name, one in found.items()], COLUMNS, "table")
    if refused := {name: one["refused"] for name, one in found.items() if one["refused"]}:
        yield ""
        yield "longer than the memory of a worker: " + ", ".join(f"{name} {count}" for name, count in refused.items())


def _row(name: str, one: dict) -> dict:
    seconds = {key: "–" if one[key] is None else f"{one[key]:.3g}" for key in one if key[:4] in TARGETS}
    return {
        "codec": name,
        "tokens held": f"{one['capacity']}",
        "requests/s": f"{one['requests_per_s']:.3g}",
        "goodput/s": f"{one['goodput_per_s']:.3g}",
        "in time, %": f"{100 * one['within_targets']:.1f}",
        "TTFT p50": seconds["ttft_p50"],
        "p99": seconds["ttft_p99"],
        "TPOT p50": seconds["tpot_p50"],
        "p99 ": seconds["tpot_p99"],
        "preempted": f"{one['preemptions']}",
        "busy, %": f"{100 * one['busy']:.0f}",
    }

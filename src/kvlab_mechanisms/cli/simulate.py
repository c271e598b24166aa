"""`kvlab simulate`: a trace of requests served by simulated workers. Heavy imports happen inside."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from pathlib import Path

from kvlab.cli.flags import Flag, path, result, whole, word
from kvlab.core.errors import UserError, suggestion
from kvlab.output.terminal import as_text

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
TARGETS = ("ttft", "tpot")
COLUMNS = (
    *("codec", "tokens held", "requests/s", "goodput/s", "in time, %", "TTFT p50", "p99", "TPOT p50", "p99 "),
    *("preempted", "busy, %"),
)
MOST_WORKERS = 100_000


def simulate_verb(args: argparse.Namespace) -> None:
    """Serve a trace of requests on simulated workers, with the step times of a measured engine.

    TRACE is a file (kvlab's JSON Lines, Azure's CSV, Mooncake's JSON Lines) or the name of published statistics,
    azure-conv or azure-code, of which --requests are made. --measured holds what steps took, by the kind of cache.

      kvlab simulate azure-conv --lengths 0.1 --rate 2 --codec bf16 klt4 --memory 64MiB --slo ttft=5,tpot=0.5
    """
    from kvlab.cli import checked
    from kvlab_mechanisms.serving.measured import arm_named, read_measured

    slo, memory = targets(args.slo), size(args.memory)
    if not 1 <= args.workers <= MOST_WORKERS:
        raise UserError(f"--workers {args.workers}; allowed: from 1 to {MOST_WORKERS}")
    arms = read_measured(args.measured)
    named = {name: arm_named(arms, name) for name in dict.fromkeys(args.codec or arms)}
    checked.writable(args.json)
    trace = requests(args)
    found = {name: _served(trace, arm, memory, slo, args) for name, arm in named.items()}
    if args.json:
        from kvlab.core.records import write_json

        write_json(args.json, {"trace": str(args.trace), "memory": memory, "chunk": args.chunk, "arms": found})
    print("\n".join(said(args, trace, found)))


def requests(args: argparse.Namespace):
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


def _served(trace, arm, memory: int, slo, args: argparse.Namespace) -> dict:
    from kvlab_mechanisms.serving.policies.gateway import Gateway
    from kvlab_mechanisms.serving.policies.preempt import Switch
    from kvlab_mechanisms.serving.simulate import simulate
    from kvlab_mechanisms.serving.worker import Shape, Worker

    shape = Shape(memory, arm.token_bytes, arm.page, args.chunk, args.most)
    swap = Switch(arm.costs, args.chunk, arm.token_bytes, args.swap) if args.swap else None
    workers = [Worker(arm.costs, shape, swap=swap) for _ in range(args.workers)]
    gateway = Gateway(args.gateway)
    for number in range(args.workers):
        gateway.register(number)
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


def said(args: argparse.Namespace, trace, found: dict) -> Iterator[str]:
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


FLAGS: list[Flag] = [
    ("trace", {"metavar": "TRACE", "help": "a file, azure-conv or azure-code"}),
    path("--measured", "what steps took; default: results/serving/steps.json", required=False,
         default=Path("results/serving/steps.json")),
    word("--codec", "of --measured; several may be named; default: all", nargs="+"),
    word("--workers", "default: 1", type=whole(1), default=1, metavar="N"),
    word("--memory", "of KV pages of a worker, as 512MiB; default: 1GiB", default="1GiB", metavar="SIZE"),
    word("--slo", "targets in seconds, as ttft=1,tpot=0.1; default: none", default="", metavar="TARGETS"),
    word("--rate", "requests per second; default: the trace's own", type=float, metavar="R"),
    word("--requests", "of a made trace; default: 10000", type=whole(1), default=10000, metavar="N"),
    word("--lengths", "of a made trace, times the published ones; default: 1", type=float, default=1.0, metavar="F"),
    word("--seed", "of a made trace; default: 0", type=whole(0), default=0, metavar="N"),
    word("--gateway", "default: least", choices=("least", "two", "prefix"), default="least"),
    word("--chunk", "tokens of a step; default: 512", type=whole(1), default=512, metavar="N"),
    word("--most", "sequences of a worker at once; default: 64", type=whole(1), default=64, metavar="N"),
    word("--swap", "bytes per second to the host's memory; default: preempted ones are computed again",
         type=whole(1), metavar="B"),
    result("--json", "everything that was found, for programs", required=False),
]  # fmt: skip

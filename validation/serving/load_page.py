"""LOAD.md out of ``load.json``: it can be written up again at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvlab.core.records import write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy
from kvlab_mechanisms.serving.predictor import STEP

TEMPLATES = Path(__file__).parent / "templates"
PLAIN = "bf16"
MIB = 1 << 20
SENT = 1000  # tokens of a hand-over
LINKS = (1, 10, 100)  # Gbit/s
ALIKE = 0.02  # of bf16's, within which nothing is won or lost
LATENCIES = ("TTFT p50 / p99", "TPOT p50 / p99")
COMPARED = ("", "vLLM", "simulated", "off by, %", "allowed, %")
TARGETS = {"tokens_per_s": 0.10, "ttft_p50": 0.20, "tpot_p50": 0.20}
WHY = (
    "Requests come faster than they are served, so that a first token waits for all that came before: what a predicted"
    " step is off by adds up along the queue"
)
WORDS = {
    "tokens_per_s": "tokens per second",
    "ttft_p50": "TTFT, median, s",
    "ttft_p99": "TTFT, 99th percentile, s",
    "tpot_p50": "TPOT, median, s",
    "tpot_p99": "TPOT, 99th percentile, s",
}


def write(data: dict, out: Path) -> None:
    """Write ``LOAD.md``."""
    fmt.refuse_non_finite(data, "load")
    text = environment(TEMPLATES).get_template("load.md.j2").render(context(data))
    write_text(Path(out) / "LOAD.md", tidy(text))


def context(data: dict) -> dict:
    """Everything that the template names, as text."""
    own = data["machine"]
    return {
        "model": data["model"]["name"],
        "disclosure": data["model"]["disclosure"],
        "machine": f"{own['processor']}, {own['cores']} cores, {own['system']}",
        "load": fmt.number(data["load"], 2),
        "slo": {name: fmt.number(seconds) for name, seconds in data["slo"].items()},
        "sentence": " ".join(sentences(data["single"])),
        "steps": fmt.table(("cache", "bytes a token", *STEP, "steps", "not told apart"), steps(data["arms"])),
        "goodput": fmt.table(
            (
                "cache",
                "KV, MiB",
                "tokens held",
                "load, /s",
                "in time, /s",
                f"times {PLAIN}'s",
                "TTFT p50 / p99",
                "TPOT p50 / p99",
                "preempted",
            ),
            goodput(data["single"]),
        ),
        "cost": fmt.table(
            ("cache", "KV, MiB", "worker-hours", "at 1 and 0", "at 1 and 1", "at 1 and 100"), cost(data["single"])
        ),
        "workers": fmt.table(
            ("cache", "workers", "requests", "in time, /s", "a worker", *LATENCIES, "preempted"),
            workers(data["many"]),
        ),
        "handover": fmt.table(
            (
                "cache",
                "bytes a token",
                f"MB of {SENT:,} tokens",
                *(f"s at {gbit} Gbit/s" for gbit in LINKS),
                "prefill, s more than " + PLAIN,
                "pays below, Gbit/s",
            ),
            handover(data["arms"]),
        ),
        "sent": f"{SENT:,}",
        "held": [fmt.table(COMPARED, comparison_rows(one)) for one in data["held"].values()],
        "served": [
            {"table": fmt.table((COMPARED[0], "vllm serve", *COMPARED[2:]), comparison_rows(one))} | paced(one)
            for one in data["served"]
        ],
        "facts": [
            f"{name}: {one['requests']} requests, {one['steps']} steps, whose seconds are predicted to"
            f" {fmt.number(one['steps_ratio'])} of themselves; {missed(one)}"
            for name, one in data["held"].items()
        ],
    }


def sentences(single: dict) -> Iterator[str]:
    """Where each codec pays."""
    for name, rows in single.items():
        if name == PLAIN:
            continue
        ratios = [
            (one["memory"], one["goodput_per_s"] / plain["goodput_per_s"])
            for one, plain in zip(rows, single[PLAIN], strict=True)
            if plain["goodput_per_s"]
        ]
        pays = [f"{memory // MIB} MiB ({fmt.number(ratio, 2)} times)" for memory, ratio in ratios if ratio > 1 + ALIKE]
        loses = [f"{memory // MIB} MiB ({fmt.number(ratio, 2)})" for memory, ratio in ratios if ratio < 1 - ALIKE]
        said = f"`{name}` serves more requests in time than {PLAIN} with " + ", ".join(pays) if pays else ""
        said = said or f"`{name}` pays at none of these memories"
        yield said + (f", and serves fewer with {', '.join(loses)}" if loses else "") + "."


def steps(arms: dict) -> Iterator[tuple[str, ...]]:
    """What a step takes, by what is in it, in microseconds."""
    for name, one in arms.items():
        numbers = [fmt.number(1e6 * seconds) for seconds in one["seconds"]]
        yield name, fmt.number(one["token_bytes"], 5), *numbers, str(one["rows"]), ", ".join(one["undetermined"]) or "–"


def pair(one: dict, name: str) -> str:
    """Median and 99th percentile."""
    return " / ".join(
        "–" if one[f"{name}_{rank}"] is None else fmt.number(one[f"{name}_{rank}"]) for rank in ("p50", "p99")
    )


def goodput(single: dict) -> Iterator[tuple[str, ...]]:
    """By cache and memory, at the load with most requests in time."""
    for name, rows in single.items():
        for one, plain in zip(rows, single[PLAIN], strict=True):
            base = plain["goodput_per_s"]
            yield (
                *(name, str(one["memory"] // MIB), str(one["capacity"]), fmt.number(one["arrived"])),
                fmt.number(one["goodput_per_s"]),
                fmt.number(one["goodput_per_s"] / base) if base else "–",
                *(pair(one, "ttft"), pair(one, "tpot"), str(one["preemptions"])),
            )


def cost(single: dict) -> Iterator[tuple[str, ...]]:
    """Per million tokens of answers in time: worker-hours, and money at prices of a worker-hour and a GiB-hour."""
    for name, rows in single.items():
        for one in rows:
            if not one["good_tokens_per_s"]:
                continue
            hours, gib = 1e6 / 3600 / one["good_tokens_per_s"], one["memory"] / (1 << 30)
            money = (fmt.number(hours * (1 + price * gib)) for price in (0, 1, 100))
            yield name, str(one["memory"] // MIB), fmt.number(hours), *money


def handover(arms: dict) -> Iterator[tuple[str, ...]]:
    """What goes from a worker that prefills to one that decodes, and what making it takes more than plain pages."""
    prefill = STEP.index("prefill token")
    plain = arms[PLAIN]
    for name, one in arms.items():
        size = one["token_bytes"]
        more = one["seconds"][prefill] - plain["seconds"][prefill]
        saved = plain["token_bytes"] - size
        below = "–" if name == PLAIN else "any" if more <= 0 < saved else fmt.number(8e-9 * max(saved, 0) / more)
        yield (
            *(name, fmt.number(size, 5), fmt.number(SENT * size / 1e6)),
            *(fmt.number(8e-9 * SENT * size / gbit) for gbit in LINKS),
            *(fmt.number(SENT * more) if name != PLAIN else "–", below),
        )


def workers(many: dict) -> Iterator[tuple[str, ...]]:
    """By the number of workers."""
    for name, rows in many.items():
        for one in rows:
            yield (
                *(name, str(one["workers"]), str(one["requests"]), fmt.number(one["goodput_per_s"])),
                fmt.number(one["goodput_per_s"] / one["workers"]),
                *(pair(one, "ttft"), pair(one, "tpot"), str(one["preemptions"])),
            )


def off(one: dict, name: str) -> float:
    """By which share the simulator is off."""
    engine, found = one[name]
    return found / engine - 1


def comparison_rows(one: dict) -> Iterator[tuple[str, ...]]:
    """The engine beside the simulator."""
    for name, text in WORDS.items():
        allowed = f"{100 * TARGETS[name]:.0f}" if name in TARGETS else "–"
        yield text, *map(fmt.number, one[name]), f"{100 * off(one, name):+.1f}", allowed
    for name in ("preemptions", "denied"):
        if name in one:
            yield name, *map(str, one[name]), "–", "–"


def paced(one: dict) -> dict[str, str]:
    """The load of the real server, in words."""
    arm = one["arm"]
    return {
        "requests": f"{one['requests']:,}",
        "asked": f"{one['requests'] + one['denied'][0]:,}",
        "rate": fmt.number(one["rate"]),
        "busy": f"{100 * one['busy']:.0f} %",
        "steps": f"{arm['rows']}",
        "undetermined": ", ".join(arm["undetermined"]) or "none",
        "missed": missed(one),
        **{name: str(one[name]) for name in ("slots", "full")},
    }


def missed(one: dict) -> str:
    """Which targets of the comparison are missed, and why."""
    found = [WORDS[name] for name, share in TARGETS.items() if abs(off(one, name)) > share]
    if not found:
        return "throughput, median TTFT and median TPOT are within what is allowed"
    return f"missed: {', '.join(found)}. {WHY}"

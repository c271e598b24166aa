"""CAPACITY.md out of ``capacity.json``. Needs no torch, so a study can be written up again at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvlab.core.records import write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy

TEMPLATES = Path(__file__).parent / "templates"
PLAIN = "bf16"
CORRUPT = 1.0  # nats per token, above which what a cache holds is no longer the context


def write(data: dict, out: Path) -> None:
    """Write ``CAPACITY.md`` from what `study.study` measured.

    Raises
    ------
    NonFinite
        When a number is NaN or infinite.
    """
    fmt.refuse_non_finite(data, "capacity")
    text = environment(TEMPLATES).get_template("capacity.md.j2").render(context(data))
    write_text(Path(out) / "CAPACITY.md", tidy(text))


def context(data: dict) -> dict:
    """Everything that the template names, as text."""
    arms, settings = data["arms"], data["settings"]
    served = {name: arm for name, arm in arms.items() if "batches" in arm}
    return {
        "model": data["model"]["name"],
        "disclosure": data["model"]["disclosure"],
        "machine": f"{data['machine']['processor']}, {data['machine']['cores']} cores, {data['machine']['system']}",
        "threads": data["threads"] or "all",
        "load": fmt.number(data["load"], 2),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items())),
        "dtype": data["dtype"],
        "settings": {name: fmt.number(value) for name, value in settings.items()},
        "capacity": fmt.table(("cache", "tokens in 1 GiB", f"times {PLAIN}'s", "KL, nats per token"), capacity(served)),
        "speed": fmt.table(
            ("cache", "requests at once", "prefill, s", "step, ms", f"step, times {PLAIN}'s", "tokens per s"),
            speed(served),
        ),
        "returning": fmt.table(
            ("cache", "tokens it holds", "prompt tokens found in it, %", "seconds an answer", f"times {PLAIN}'s"),
            returning(served),
        ),
        "crowd": fmt.table(("cache", "preemptions", "seconds for all", f"times {PLAIN}'s"), crowd(served)),
        "upstream": [upstream(name, arm) for name, arm in arms.items() if name not in served],
        "sentence": sentence(served),
    }


def capacity(served: dict) -> Iterator[tuple[str, ...]]:
    """Tokens that fit, and what they cost in answers."""
    plain = served[PLAIN]["tokens"]
    for name, arm in served.items():
        kl = fmt.DASH if name == PLAIN else fmt.number(arm["kl"])
        yield name, fmt.number(arm["tokens"]), fmt.fixed(arm["tokens"] / plain, 2), kl


def speed(served: dict) -> Iterator[tuple[str, ...]]:
    """Prefill and decoding by the number of requests."""
    plain = {row["batch"]: row["step"] for row in served[PLAIN]["batches"]}
    for name, arm in served.items():
        for row in arm["batches"]:
            size, step = row["batch"], row["step"]
            yield (
                *(name, fmt.number(size), fmt.number(row["prefill"]), fmt.number(1000 * step)),
                *(fmt.fixed(step / plain[size], 1), fmt.number(size / step)),
            )


def returning(served: dict) -> Iterator[tuple[str, ...]]:
    """Documents that come back."""
    plain = served[PLAIN]["returning"]["seconds"]
    for name, arm in served.items():
        found = arm["returning"]
        yield (
            *(name, fmt.number(arm["small_tokens"]), fmt.fixed(100 * found["cached"], 0)),
            *(fmt.number(found["seconds"]), fmt.fixed(found["seconds"] / plain, 2)),
        )


def crowd(served: dict) -> Iterator[tuple[str, ...]]:
    """More requests than fit."""
    plain = served[PLAIN]["crowd"]["seconds"]
    for name, arm in served.items():
        found = arm["crowd"]
        yield (
            *(name, fmt.number(found["preemptions"]), fmt.number(found["seconds"])),
            fmt.fixed(found["seconds"] / plain, 2),
        )


def upstream(name: str, arm: dict) -> str:
    """What became of one of vLLM's own low-bit dtypes."""
    if "refused" in arm:
        return f"`{name}` does not start: {arm['refused']}"
    if arm["kl"] is None:
        return f"`{name}` starts, says nothing, and gives logits that are not finite"
    if arm["kl"] > CORRUPT:
        return (
            f"`{name}` starts, says nothing, and answers {fmt.number(arm['kl'])} nats per token from {PLAIN}: corrupt"
        )
    return f"`{name}` starts, and answers {fmt.number(arm['kl'])} nats per token from {PLAIN}"


def sentence(served: dict) -> str:
    """What a practitioner needs, from the numbers: what is held, and where time is won and lost."""
    parts = []
    for name, arm in served.items():
        if name == PLAIN:
            continue
        plain = served[PLAIN]
        steps = [own["step"] / other["step"] for own, other in zip(arm["batches"], plain["batches"], strict=True)]
        back = plain["returning"]["seconds"] / arm["returning"]["seconds"]
        full = plain["crowd"]["seconds"] / arm["crowd"]["seconds"]
        parts.append(
            f"`{name}` holds {fmt.fixed(arm['tokens'] / plain['tokens'], 1)} times {PLAIN}'s tokens; a step takes"
            f" {fmt.fixed(min(steps), 1)} to {fmt.fixed(max(steps), 1)} times as long; where documents come back that"
            f" {PLAIN} had to drop, an answer is {times(back)}; where more requests come at once than {PLAIN} holds,"
            f" all are done {times(full)}."
        )
    return " ".join(parts)


def times(ratio: float) -> str:
    """A ratio of seconds in words."""
    if fmt.fixed(ratio, 1) == "1.0":
        return "as fast"
    if ratio >= 1:
        return f"{fmt.fixed(ratio, 1)} times as fast"
    return f"{fmt.fixed(1 / ratio, 1)} times as slow"

"""What a step takes at several lengths of context, by what the cache holds.

    python -m validation.serving.contexts MODEL OUT.json LENGTH:REQUESTS,REQUESTS... CACHE...

A cache is ``auto`` (the model's dtype), a dtype of vLLM's, or a recipe file. Each has an engine in a process of its
own, all at once, and they take turns step by step: what else the machine does is the same for all. Prompts are runs of
an encyclopedia's tokens. Seconds are the processor's, as in `validation.serving.arm`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvlab.core.errors import UserError
from kvlab.core.records import read_json, write_json
from validation.serving.arm import QUIET, names, prefilled, start, stepped, timed

STEPS = 25  # of each batch, of which the median is taken
BYTES = 1 << 30


def measured(model: Path, lengths: dict[int, list[int]], caches: list[str]) -> dict[str, list[dict]]:
    """By cache, of each batch the seconds of its prefill and the median of its steps'."""
    from transformers import AutoTokenizer

    from kvlab.text.encyclopedia import extract

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [one for article in extract() for one in tokenizer(article.text)["input_ids"]]
    if (most := max(length * max(sizes) for length, sizes in lengths.items())) > len(ids):
        raise UserError(f"the encyclopedia has {len(ids)} tokens of this model; asked for are {most}")
    task = {"model": str(model), "dtype": "bfloat16", "bytes": BYTES, "longest": max(lengths) + STEPS + 64}
    found = {Path(cache).stem: [] for cache in caches}
    with ExitStack() as stack:
        engines = {
            Path(cache).stem: stack.enter_context(engine_of(task | {"prefix_caching": False, "cache": cache}))
            for cache in caches
        }
        for length, size in ((length, size) for length, sizes in lengths.items() for size in sizes):
            prompts = [ids[first : first + length] for first in range(0, size * length, length)]
            prefill = {name: engine.ask("prefilled", prompts) for name, engine in engines.items()}
            turns = [{name: engine.ask("stepped", None) for name, engine in engines.items()} for _ in range(STEPS)]
            for name, engine in engines.items():
                engine.ask("abort", prompts)
                step = statistics.median(turn[name] for turn in turns)
                found[name].append({"length": length, "batch": size, "prefill": prefill[name], "step": step})
    return found


class Served:
    """An engine in another process, which does one thing at a time and says how many seconds it took.

    Parameters
    ----------
    process : subprocess.Popen
        Of `main` with a task.
    """

    def __init__(self, process: subprocess.Popen):
        self.process = process

    def ask(self, what: str, prompts: list[list[int]] | None) -> float:
        """Seconds of ``prefilled``, ``stepped`` or ``abort``.

        Raises
        ------
        UserError
            The process ended without an answer.
        """
        self.process.stdin.write(json.dumps([what, prompts]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER"):
                return json.loads(line.removeprefix("ANSWER"))
        raise UserError(f"the engine of {self.process.args[-1]} ended; what it said stands above")


@contextmanager
def engine_of(task: dict) -> Iterator[Served]:
    """The engine that a task asks for, in a process that ends with the context."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVLAB_"))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "task.json")
        path.write_text(json.dumps(task))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "validation.serving.contexts", str(path)]
        with subprocess.Popen(command, env=clean | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
            try:
                yield Served(process)
            finally:
                process.stdin.close()


def answers(task: dict) -> None:
    """Do what each line of standard input asks of the engine of a task, after a batch that warms up."""
    engine = start(task).llm_engine
    timed(engine, [list(range(100, 500))], 5)
    for line in sys.stdin:
        print("ANSWER", answer(engine, *json.loads(line)), flush=True)


def answer(engine: Any, what: str, prompts: list[list[int]] | None) -> float:
    """See `Served.ask`."""
    if what == "prefilled":
        return prefilled(engine, prompts)
    if what == "stepped":
        return stepped(engine)[0]
    engine.abort_request(names(prompts))
    return 0.0


def main() -> None:
    """See the module; with one argument, the task of a process."""
    if len(sys.argv) == 2:
        os.environ.update(QUIET)
        answers(read_json(Path(sys.argv[1])))
        return
    model, out, *rest = sys.argv[1:]
    pairs = [one.split(":") for one in rest if ":" in one]
    lengths = {int(length): [int(size) for size in sizes.split(",")] for length, sizes in pairs}
    write_json(Path(out), measured(Path(model), lengths, [one for one in rest if ":" not in one]))


if __name__ == "__main__":
    main()

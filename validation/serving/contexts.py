"""What a step takes at several lengths of context, by what the cache holds, each cache in a process of its own.

    python -m validation.serving.contexts MODEL OUT.json LENGTH:REQUESTS,REQUESTS... CACHE...

A cache is ``auto`` (the model's dtype), a dtype of vLLM's, or a recipe file. Prompts are runs of an encyclopedia's
tokens. Seconds are the processor's, as in `validation.serving.arm`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvlab.core.errors import UserError
from kvlab.core.records import read_json, write_json
from validation.serving.arm import QUIET, start, timed

STEPS = 9  # of each batch, of which the median is taken
BYTES = 1 << 30


def measured(model: Path, lengths: dict[int, list[int]], caches: list[str]) -> dict:
    """By cache what `answer` found."""
    from transformers import AutoTokenizer

    from kvlab.text.encyclopedia import extract

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [one for article in extract() for one in tokenizer(article.text)["input_ids"]]
    prompts = {
        length: [ids[start:][:length] for start in range(0, max(sizes) * length, length)]
        for length, sizes in lengths.items()
    }
    if (most := max(length * max(sizes) for length, sizes in lengths.items())) > len(ids):
        raise UserError(f"the encyclopedia has {len(ids)} tokens of this model; asked for are {most}")
    task = {"model": str(model), "dtype": "bfloat16", "bytes": BYTES, "longest": max(lengths) + STEPS + 64}
    task |= {"prefix_caching": False, "prompts": prompts, "batches": lengths}
    return {Path(cache).stem: in_a_process(task | {"cache": cache}) for cache in caches}


def in_a_process(task: dict) -> list[dict]:
    """What `main` prints of a task."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "task.json")
        path.write_text(json.dumps(task))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVLAB_"))}
        arm = [sys.executable, "-m", "validation.serving.contexts", str(path)]
        out = subprocess.run(arm, check=True, stdout=subprocess.PIPE, text=True, env=clean | {"OMP_NUM_THREADS": "1"})
    (line,) = [line for line in out.stdout.splitlines() if line.startswith("ANSWER")]
    return json.loads(line.removeprefix("ANSWER"))


def answer(task: dict) -> list[dict]:
    """Seconds of the prefill and of a step of each of a task's batches, after one that warms up."""
    engine = start(task).llm_engine
    timed(engine, [next(iter(task["prompts"].values()))[0]], STEPS)
    return [
        {"length": int(length), **timed(engine, task["prompts"][length][:size], STEPS)}
        for length, sizes in task["batches"].items()
        for size in sizes
    ]


def main() -> None:
    """See the module; with one argument, the task of a process."""
    if len(sys.argv) == 2:
        os.environ.update(QUIET)
        print("ANSWER", json.dumps(answer(read_json(Path(sys.argv[1])))), flush=True)
        return
    model, out, *rest = sys.argv[1:]
    pairs = [one.split(":") for one in rest if ":" in one]
    lengths = {int(length): [int(size) for size in sizes.split(",")] for length, sizes in pairs}
    write_json(Path(out), measured(Path(model), lengths, [one for one in rest if ":" not in one]))


if __name__ == "__main__":
    main()

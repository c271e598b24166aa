"""Speed and memory of the transformers cache beside `DynamicCache`, by its calibration and by what it holds decoded.

    python -m validation.serving.cached MODEL TEXT FILE.kv... [--dtype bfloat16] [--batches 1,8] [--windows 0,16,all]

All caches hold the same prompts; then each in turn takes one step, so that whatever else the machine does falls on all
of them alike. The median of the steps' ratios is what counts. Times are of the processor, in one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache

from kvlab.cache.hf.kv_cache import KVCache
from kvlab.cache.transformers_cache import from_file
from kvlab.core.errors import ParamsError

MIB = 2**20
WARM = 2  # steps that are not counted
HEAD = "| batch | cache | ms a step | of plain speed | stored, MiB | beside | tables | all, of plain | prefill, s |"


class Line(NamedTuple):
    """One cache: its name, times of its steps and of the prefill, and its bytes; tables are those of all together."""

    name: str
    steps: list[float]
    prefill: float
    coded: int
    decoded: int
    tables: int


@torch.inference_mode()
def measured(model, caches: dict[str, Cache], prompts: Tensor, steps: int) -> list[Line]:
    """Every cache filled with the prompts [batch, tokens], and then one step of each in turn."""
    prefill = {name: timed(model, cache, prompts) for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(WARM + steps):
        for name, cache in caches.items():
            times[name].append(timed(model, cache, prompts[:, step : step + 1]))
    return [Line(name, times[name][WARM:], prefill[name], *cache_bytes(cache)) for name, cache in caches.items()]


def timed(model, cache: Cache, ids: Tensor) -> float:
    """Processor seconds of one call."""
    start = time.process_time()
    model(ids, past_key_values=cache, logits_to_keep=1)
    return time.process_time() - start


def cache_bytes(cache: Cache) -> tuple[int, int, int]:
    """Bytes as stored, of what is decoded beside them, and of what codes them."""
    if isinstance(cache, KVCache):
        return cache.nbytes, cache.working_bytes, cache.tables_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), 0, 0


def rows(batch: int, lines: list[Line]) -> Iterator[str]:
    """Lines of the table; the first one is the plain cache."""
    plain = lines[0]
    for line in lines:
        ratio = statistics.median(a / b for a, b in zip(plain.steps, line.steps, strict=True))
        together = (line.coded + line.decoded + line.tables) / plain.coded
        cells = (
            *(str(batch), line.name, f"{1e3 * statistics.median(line.steps):.0f}", f"{ratio:.2f}"),
            *(f"{part / MIB:.1f}" for part in (line.coded, line.decoded, line.tables)),
            *(f"{together:.3f}", f"{line.prefill:.1f}"),
        )
        yield f"| {' | '.join(cells)} |"


def prompts_of(model: str, text: Path, batch: int, tokens: int) -> Tensor:
    """Neighbouring pieces of a text, each an eighth of a prompt after the one before [batch, tokens]."""
    ids = AutoTokenizer.from_pretrained(model)(text.read_text()).input_ids
    apart = tokens // 8
    if len(ids) < tokens + (batch - 1) * apart:
        raise ParamsError(f"{text} has {len(ids)} tokens; {batch} prompts take {tokens + (batch - 1) * apart}")
    return torch.tensor([ids[row * apart : row * apart + tokens] for row in range(batch)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("files", type=Path, nargs="+", help="what `kvlab calibrate` wrote")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--windows", default="0", help="MiB held decoded, or all")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    fitted = {str(file): from_file(model, file) for file in given.files}
    print(HEAD, "|".join(["", *["---:"] * 9, ""]), sep="\n")
    for batch in map(int, given.batches.split(",")):
        caches: dict[str, Cache] = {"DynamicCache": DynamicCache()}
        for name, own in fitted.items():
            # klt after its rotary embedding holds nothing decoded
            for said in given.windows.split(",") if own[0].rotary == "before" else ["0"]:
                window = None if said == "all" else int(float(said) * MIB)
                caches[name if window == 0 else f"{name}, {said} decoded"] = KVCache(model, *own, window_bytes=window)
        prompts = prompts_of(given.model, given.text, batch, given.context)
        print(*rows(batch, measured(model, caches, prompts, given.steps)), sep="\n", flush=True)


if __name__ == "__main__":
    main()

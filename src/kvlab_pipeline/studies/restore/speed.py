"""How long a prompt takes cold, restored, and in the one forward that nothing has to be cut for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.core.errors import Fault
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.restore import RestoreReport, restore
from kvlab_pipeline.studies.restore.prompts import joined, pool_of, shared_tokens, snapshot_of
from kvlab_pipeline.studies.restore.record import RestoreSettings, Speed


def speeds(model: PagedModel, windows: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path) -> list[Speed]:
    """Every length, the shortest first."""
    lengths = tqdm(sorted({*settings.lengths, *settings.shorter}), desc="prefill", unit="length")
    return [speed(model, joined(windows, 0, length), settings, folder / f"length-{length}") for length in lengths]


def speed(model: PagedModel, prompt: Sequence[int], settings: RestoreSettings, path: Path) -> Speed:
    """One prompt: the ways take turns, another one first each round, after a round that does not count."""
    size, length = settings.chunk_tokens, len(prompt)
    config, shared = pool_of(size, length), shared_tokens(length, settings.suffix, size)
    made = snapshot_of(model, prompt[:shared], config, path)
    reports: list[RestoreReport] = []

    def cold() -> float:
        return timed(restore(model, prompt, None, config, mode="recompute").report.prefill_ms)

    def warm() -> float:
        reports.append(restore(model, prompt, made.path, config, mode="consume").report)
        return timed(reports[-1].prefill_ms)

    took = turns([cold, warm, lambda: whole(model, prompt)], settings.rounds)
    counted = reports[1:]
    return Speed(
        length=length,
        prefix_len=min(report.prefix_len for report in counted),
        cold_ms=took[0],
        warm_ms=took[1],
        load_ms=tuple(timed(report.load_ms) for report in counted),
        whole_ms=took[2],
        save_ms=made.save_ms,
        bytes_read=counted[0].bytes_read,
        file_bytes=made.saved.nbytes,
    )


def turns(ways: Sequence[Callable[[], float]], rounds: int) -> list[tuple[float, ...]]:
    """What each way took in each round; the first round of all warms up and is left out."""
    took: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for number in range(len(ways)):
            chosen = (turn + number) % len(ways)
            took[chosen].append(ways[chosen]())
    return [tuple(found[1:]) for found in took]


@torch.no_grad()
def whole(model: PagedModel, prompt: Sequence[int]) -> float:
    """Milliseconds of one forward over a prompt, into transformers' own cache."""
    ids = torch.tensor([list(prompt)], device=model.device)
    begun = time.perf_counter()
    model.model(ids, use_cache=True, logits_to_keep=1).logits.cpu()
    return 1e3 * (time.perf_counter() - begun)


def timed(value: float | None) -> float:
    """A time that has to be there; `Fault` when it was not taken, for none is not zero."""
    if value is None:
        raise Fault("a restore did not say how long it took, so no ratio of times can be given", code="fault.untimed")
    return value

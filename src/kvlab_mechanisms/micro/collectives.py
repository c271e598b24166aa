"""Collectives between ranks beside those of torch.distributed. Apart from `measure`, for each rank imports it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from kvlab.core.errors import Fault
from kvlab_mechanisms.cluster.ranks import Ranks, all_reduce_bytes, all_to_all_bytes, even
from kvlab_mechanisms.cluster.sequence_parallel import to_heads
from kvlab_mechanisms.cluster.tensor_parallel import RowLinear, share

ROUNDS = 15  # of each time that is told; the median is


def collectives(ranks: Ranks) -> list[dict[str, Any]]:
    """Ours and torch.distributed's own on the same tensors, with the bytes that all ranks sent."""
    x, tokens = torch.randn(8, 512), torch.randn(8, 256 // ranks.world, 64)
    shares = [share(8, 8, ranks.world, rank) for rank in range(ranks.world)]
    lengths = [256 // ranks.world] * ranks.world
    flat, weight = torch.empty(tokens.numel()), torch.randn(512, 256)
    columns = torch.randn(8, 256).split(even(256, ranks.world), 1)[ranks.rank]
    row_linear, row_dtensor = RowLinear(ranks, weight), by_dtensor(ranks, weight)
    cases: list[tuple[str, str, int, Callable, Callable]] = [
        ("all-reduce", "[8, 512]", all_reduce_bytes(x.nbytes, ranks.world), lambda: ranks.all_reduce(x),
         lambda: dist.all_reduce(x.clone())),
        ("tokens to heads", "[8, 256, 64]", all_to_all_bytes(tokens.nbytes * ranks.world, ranks.world),
         lambda: to_heads(ranks, tokens, lengths, shares, "q"),
         lambda: dist.all_to_all_single(flat, tokens.reshape(-1))),
        ("row-parallel linear, beside DTensor", "[8, 256] by [256, 512]", all_reduce_bytes(4 * 8 * 512, ranks.world),
         lambda: row_linear(columns), lambda: row_dtensor(columns)),
    ]  # fmt: skip
    found = []
    for name, shape, formula, ours, theirs in cases:
        ranks.sent.clear()
        ours()
        sent = torch.tensor(sum(ranks.sent.values()))
        dist.all_reduce(sent)
        times = [median(task, dist.barrier) for task in (ours, theirs)]
        row = {"name": name, "shape": shape, "bytes": int(sent), "formula": formula}
        found.append(row | {"ours_us": times[0] * 1e6, "theirs_us": times[1] * 1e6})
        if int(sent) != formula:
            raise Fault(f"{name} sent {int(sent)} bytes, and {formula} by its formula")
    return found


def by_dtensor(ranks: Ranks, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """`RowLinear` as torch's own distributed tensors have it."""
    mesh = init_device_mesh("cpu", (ranks.world,))
    rows = distribute_tensor(weight, mesh, [Shard(1)])

    def linear(x: torch.Tensor) -> torch.Tensor:
        """This rank's columns to the whole, on every rank."""
        return F.linear(DTensor.from_local(x, mesh, [Shard(1)]), rows).redistribute(mesh, [Replicate()]).to_local()

    return linear


def median(task: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds."""
    taken = []
    for _ in range(ROUNDS + 2):
        before()
        began = perf_counter()
        task()
        taken.append(perf_counter() - began)
    return statistics.median(taken[2:])

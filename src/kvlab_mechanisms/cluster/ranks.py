"""Processes that work on one thing, and what they send one another, counted.

Everything is sent by one collective, an exchange in which each rank has a part for each other (`all_to_all_single` of
torch.distributed, over gloo on processors and nccl on GPUs). Sums are taken by the receiver in the order of the ranks:
the result is the same bits on every rank and in every run, and those of the same sum in one process.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kvlab.core.errors import Fault, UserError

PATIENCE = 120.0  # seconds that all ranks have together


class Ranks:
    """This process among the others.

    Attributes
    ----------
    rank, world : int
        Which one, of how many.
    device : torch.device
    sent : Counter
        Bytes that left this process, by collective. What a rank keeps for itself is not sent.
    """

    def __init__(self, rank: int, world: int, device: torch.device):
        self.rank, self.world, self.device = rank, world, device
        self.sent: Counter[str] = Counter()

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int], name: str = "exchange") -> list[Tensor]:
        """Give each rank its part, and take the one that each has for this rank.

        Parameters
        ----------
        parts : sequence of Tensor
            One for each rank, flat, of one dtype.
        sizes : sequence of int
            Numbers that come from each rank.

        Returns
        -------
        list of Tensor
            From each rank, flat.
        """
        if len(parts) != self.world or len(sizes) != self.world:
            raise UserError(f"{len(parts)} parts for {self.world} ranks; there is one for each")
        given = torch.cat([part.reshape(-1) for part in parts]).to(self.device)
        taken = given.new_empty(sum(sizes))
        dist.all_to_all_single(taken, given, list(sizes), [part.numel() for part in parts])
        self.sent[name] += sum(part.nbytes for n, part in enumerate(parts) if n != self.rank)
        return list(taken.split(list(sizes)))

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """The tensors of all ranks along a dimension; `sizes` says how long each is where they differ."""
        sizes = [x.shape[dim]] * self.world if sizes is None else sizes
        shapes = [[*x.shape[:dim], size, *x.shape[dim + 1 :]] for size in sizes]
        found = self.exchange([x] * self.world, [prod(shape) for shape in shapes], "all_gather")
        return torch.cat([part.view(shape) for part, shape in zip(found, shapes, strict=True)], dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, of one shape: each rank sums a part, and sends that to the others."""
        sizes = even(x.numel(), self.world)
        mine = self.exchange(x.reshape(-1).split(sizes), [sizes[self.rank]] * self.world, "all_reduce")
        total = mine[0].clone()
        for part in mine[1:]:
            total += part
        return torch.cat(self.exchange([total] * self.world, sizes, "all_reduce")).view(x.shape)


def all_gather_bytes(nbytes: int, world: int) -> int:
    """What all ranks together send to gather a tensor of so many bytes in all: each part to all but its owner."""
    return (world - 1) * nbytes


def all_reduce_bytes(nbytes: int, world: int) -> int:
    """What all ranks together send to sum tensors of so many bytes.

    Each sends 2 (n - 1) / n of them, which is the least that will do (Patarasuk & Yuan 2009, JPDC 69:117).
    """
    return 2 * (world - 1) * nbytes


def all_to_all_bytes(nbytes: int, world: int) -> int:
    """What all ranks together send to turn a tensor split along one dimension into one split along another.

    (n - 1) / n of it: of what a rank holds it keeps one part in n.
    """
    return nbytes * (world - 1) // world


def even(total: int, world: int) -> list[int]:
    """Sizes of parts that differ by one at most, the larger first."""
    return [total // world + (n < total % world) for n in range(world)]


def run(world: int, work: Callable[..., Any], *arguments: Any, seconds: float = PATIENCE) -> list[Any]:
    """What ``work(ranks, *arguments)`` returns in each of so many processes.

    Parameters
    ----------
    work : callable
        Of a module that can be imported; what it is given and returns is pickled. A script calls this under
        ``if __name__ == "__main__"``: the processes import it too.

    Raises
    ------
    Fault
        A rank failed, died or took too long; all are ended, and the first one's error is told.
    UserError
        There are to be fewer than one.
    """
    if world < 1:
        raise UserError(f"{world} ranks cannot do anything; allowed: 1 or more", code="user.no-ranks")
    context = mp.get_context("forkserver" if not torch.cuda.is_available() else "spawn")
    with tempfile.TemporaryDirectory(prefix="kvlab-ranks-") as folder:
        context.set_forkserver_preload([__name__])  # imported once for all ranks
        said = context.Queue()
        meeting = Path(folder, "meeting")
        processes = [
            context.Process(target=_rank, args=(n, world, meeting, said, work, arguments), daemon=True)
            for n in range(world)
        ]
        for process in processes:
            process.start()
        try:
            found = _collected(said, processes, seconds)
        finally:
            for process in processes:
                process.terminate()
                process.join()
    return [found[n] for n in range(world)]


def _collected(said, processes, seconds: float) -> dict[int, Any]:
    """The answers of all ranks."""
    from queue import Empty
    from time import monotonic

    found: dict[int, Any] = {}
    deadline = monotonic() + seconds
    while len(found) < len(processes):
        try:
            rank, answer, error = said.get(timeout=0.2)
        except Empty:
            dead = [n for n, one in enumerate(processes) if n not in found and one.exitcode not in (None, 0)]
            if dead or monotonic() > deadline:
                why = (
                    f"rank {dead[0]} ended with code {processes[dead[0]].exitcode}" if dead else "ranks did not answer"
                )
                raise Fault(f"{why}; {len(found)} of {len(processes)} had answered") from None
            continue
        if error:
            raise Fault(f"rank {rank} failed: {error}", code="fault.rank-failed")
        found[rank] = pickle.loads(answer)
    return found


def _rank(rank: int, world: int, meeting: Path, said, work: Callable[..., Any], arguments: tuple) -> None:
    """A process."""
    torch.set_num_threads(1)
    gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; a host's name may lead nowhere
    try:
        if gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if gpu else "gloo", f"file://{meeting}", rank=rank, world_size=world)
        answer = work(Ranks(rank, world, device), *arguments)
        said.put((rank, pickle.dumps(answer), None))  # as bytes: shared memory would be gone with this process
        dist.barrier()  # nobody closes a connection that another still reads from
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        said.put((rank, None, f"{type(error).__name__}: {error}"))

"""Which worker takes a request: the least loaded, the better of two, or the one whose cache knows how it begins.

Beginnings are placed by consistent hashing with bounded loads (Mirrokni, Thorup & Zadimoghaddam 2018, SODA, section 2):
a worker that holds more than c times the mean load is passed over for the next on the ring, so affinity never costs
more than that, and a worker that goes takes only its own keys along. Two choices: Mitzenmacher 2001, IEEE TPDS 12:1094.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from typing import Literal

import xxhash

from kvlab.core.errors import UnknownName, UserError

Policy = Literal["least", "two", "prefix"]
POLICIES = ("least", "two", "prefix")
POINTS = 64  # of a worker on the ring
TRIES = 16  # draws after which the least loaded is taken
STALE = 4  # entries of a heap per worker, above which those that are out of date are thrown out
FAILURES = 3  # in a row, after which a worker is passed over


def h64(*parts: object) -> int:
    """64 bits of a hash that is the same in every process."""
    return xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode())


class Gateway:
    """A pure state machine; it opens no connection.

    Parameters
    ----------
    policy : {"least", "two", "prefix"}
    bound : float
        c of bounded loads: no worker gets more than ceil(c x mean) for the sake of affinity.
    seed : int
        Of the two choices.
    """

    def __init__(self, policy: Policy = "least", bound: float = 1.25, seed: int = 0):
        if policy not in POLICIES:
            raise UnknownName("policy", policy, POLICIES)
        if not bound > 1:
            raise UserError(f"bound {bound:g}; allowed: above 1")
        self.policy, self.bound, self.seed = policy, bound, seed
        self.load: dict[int, int] = {}
        self.capacity: dict[int, int] = {}
        self.version: dict[int, str] = {}
        self._down: set[int] = set()
        self._failures: dict[int, int] = {}
        self._heaps: dict[str, list[tuple[float, int]]] = {}
        self._ring: list[tuple[int, int]] = []
        self._new: list[int] = []  # workers that are not on the ring yet; it is sorted when somebody asks it
        self._gone: set[int] = set()  # workers whose points are still on it
        self._names: list[int] = []
        self._total = self._drawn = self._most = 0

    def register(self, worker: int, capacity: int = 1 << 30, version: str = "") -> None:
        """A worker that takes so many requests at once."""
        if worker in self.load or capacity < 1:
            raise UserError(
                f"worker {worker} with capacity {capacity}; allowed: a new one, at least 1",
                code="user.worker-or-capacity",
            )
        self.load[worker], self.capacity[worker], self.version[worker] = 0, capacity, version
        self._heaps.setdefault(version, [])
        self._most = STALE * len(self.load) + POINTS
        self._new.append(worker)
        self._names.append(worker)
        self._push(worker)

    def deregister(self, worker: int) -> None:
        """A worker goes; what it was doing is no longer counted."""
        self._known(worker)
        self._total -= self.load.pop(worker)
        del self.capacity[worker], self.version[worker]
        self._names.remove(worker)
        self._down.discard(worker)
        if worker in self._new:
            self._new.remove(worker)
        else:
            self._gone.add(worker)

    def healthy(self, worker: int, well: bool) -> None:
        """What a probe says of a worker."""
        self._known(worker)
        if well:
            self._down.discard(worker)
            self._failures.pop(worker, None)
            self._push(worker)
        else:
            self._down.add(worker)

    def route(self, key: int = -1, version: str | None = None) -> int | None:
        """The worker that takes one more request, of this beginning (-1: none); None where none may."""
        if self.policy == "prefix" and key != -1:
            found = self._by_ring(key, version)
        elif self.policy == "two":
            found = self._of_two(version)
        else:
            found = self._least(version)
        if found is not None:
            self.load[found] += 1
            self._total += 1
            self._push(found)
        return found

    def complete(self, worker: int, ok: bool = True) -> None:
        """A worker has done one; several failures in a row mark it unhealthy."""
        self._known(worker)
        if not self.load[worker]:
            raise UserError(f"worker {worker} completes a request, and holds none", code="user.no-request")
        self.load[worker] -= 1
        self._total -= 1
        if not ok:
            self._failures[worker] = self._failures.get(worker, 0) + 1
            if self._failures[worker] >= FAILURES:
                self._down.add(worker)
        elif self._failures:
            self._failures.pop(worker, None)
        self._push(worker)

    # ------------------------------------------------------------------------------ how

    def _known(self, worker: int) -> None:
        if worker not in self.load:
            raise UnknownName("worker", worker, self.load)

    def _may(self, worker: int, version: str | None = None) -> bool:
        if worker not in self.load or worker in self._down or self.load[worker] >= self.capacity[worker]:
            return False
        return version is None or self.version[worker] == version

    def _push(self, worker: int) -> None:
        heap = self._heaps[self.version[worker]]
        heapq.heappush(heap, (self.load[worker] / self.capacity[worker], worker))
        if len(heap) > self._most:
            self._tidy(self.version[worker])

    def _tidy(self, version: str) -> None:
        """Throw out entries that are out of date and never came up."""
        mine = [worker for worker, own in self.version.items() if own == version]
        self._heaps[version] = sorted((self.load[worker] / self.capacity[worker], worker) for worker in mine)

    def _top(self, version: str) -> tuple[float, int] | None:
        """The least loaded of a version; entries that are out of date are dropped as they come up."""
        heap = self._heaps.get(version, ())
        while heap:
            share, worker = top = heap[0]
            load = None if worker in self._down else self.load.get(worker)
            if load is not None and share == load / self.capacity[worker] < 1 and self.version[worker] == version:
                return top
            heapq.heappop(heap)
        return None

    def _least(self, version: str | None) -> int | None:
        if version is None and len(self._heaps) > 1:
            return min(filter(None, map(self._top, self._heaps)), default=(0, None))[1]
        top = self._top(next(iter(self._heaps), "") if version is None else version)
        return top[1] if top else None

    def _of_two(self, version: str | None) -> int | None:
        found: list[int] = []
        for _ in range(TRIES):
            self._drawn += 1
            worker = self._names[h64(self.seed, self._drawn) % len(self._names)] if self._names else -1
            found += [worker] if self._may(worker, version) else []
            if len(found) == 2:
                return min(found, key=lambda worker: (self.load[worker] / self.capacity[worker], worker))
        return self._least(version)

    def _sorted_ring(self) -> list[tuple[int, int]]:
        if self._new or self._gone:
            kept = [point for point in self._ring if point[1] not in self._gone]
            points = [(h64("point", worker, i), worker) for worker in self._new for i in range(POINTS)]
            self._ring = sorted(kept + points)
            self._new.clear()
            self._gone.clear()
        return self._ring

    def _by_ring(self, key: int, version: str | None) -> int | None:
        able = sum(self._may(worker, version) for worker in self.load) if len(self.load) <= 64 else len(self.load)
        most = math.ceil(self.bound * (self._total + 1) / max(able, 1))
        ring = self._sorted_ring()
        start = bisect_left(ring, (h64("key", key), -1))
        for at in range(len(ring)):
            worker = ring[(start + at) % len(ring)][1]
            if self._may(worker, version) and self.load[worker] < most:
                return worker
        return self._least(version)

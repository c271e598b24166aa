"""A second tier for pages of K and V: host memory with a budget, and what is needed next on its way back early.

In inference nothing but K and V is worth moving out, so what is moved are pages of them. The tier holds bytes, exact
or coded by whoever hands them in; coded pages cross in the time that their bits take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from kvlab.core.counts import counted
from kvlab.core.errors import PagerError, PoolExhausted


@dataclass
class Traffic:
    """What passed so far.

    Attributes
    ----------
    stored, fetched : int
        Pages.
    bytes_out, bytes_back : int
    dropped : int
        Pages that went because the budget was spent.
    early, late : int
        Fetches of a page that had been asked for before, and of one that had not.
    stalled : float
        Seconds that fetches waited.
    """

    stored: int = 0
    fetched: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    dropped: int = 0
    early: int = 0
    late: int = 0
    stalled: float = 0.0


@dataclass
class HeldPages:
    """A page in host memory: its bytes, the page that they are, what tells that its copy is whole, and its size."""

    buffer: Tensor
    page: Tensor
    ready: torch.cuda.Event | None
    nbytes: int


class HostTier:
    """Pages in host memory, by key; the one used longest ago goes when the budget is spent.

    With a GPU, buffers are pinned and copies run on a stream of their own. Without, a thread copies.

    Parameters
    ----------
    budget : int
        Bytes of the buffers, those kept for reuse included.
    device : str
        Where pages come from and go back to.
    """

    def __init__(self, budget: int, device: str = "cpu"):
        self.budget = counted("budget", budget, least=1)
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._held: OrderedDict[Hashable, HeldPages] = OrderedDict()
        self._spare: dict[int, list[Tensor]] = {}
        self._coming: dict[Hashable, Future | tuple[Tensor, torch.cuda.Event]] = {}
        self._bytes = 0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "host-tier") if self._stream is None else None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, never above the budget."""
        return self._bytes

    def offload(self, key: Hashable, page: Tensor) -> None:
        """Copy a page out; what happens to it afterwards does not reach the copy.

        Raises
        ------
        PoolExhausted
            The page alone is larger than the budget; nothing has changed.
        """
        size, page = page.nbytes, page.detach() if page.requires_grad else page
        if size > self.budget:
            raise PoolExhausted(
                f"a page of {size} bytes is larger than the budget of {self.budget}",
                code="pool-exhausted.page-too-large",
            )
        held = self._held.get(key)
        if held is not None and self._in_place(key, held, page):
            held.page.copy_(page)
            self._held.move_to_end(key)
        else:
            if held is not None:
                self.evict(key)
            buffer = self._buffer(size)
            kept = buffer.view(page.dtype).view(page.shape)
            self._held[key] = HeldPages(buffer, kept, self._copy_out(kept, page), size)
        self.traffic.stored += 1
        self.traffic.bytes_out += size

    def prefetch(self, key: Hashable) -> None:
        """Begin to copy a page back, for a `fetch` that comes later; `PagerError` for one that is not here."""
        held = self._known(key)
        self._held.move_to_end(key)  # what is about to be used does not go for want of room
        if key not in self._coming:
            start = self._thread.submit if self._thread else (lambda copy, page: copy(page))
            self._coming[key] = start(self._copy_back, held)

    def fetch(self, key: Hashable) -> Tensor:
        """A page as it was, in its shape and dtype on the device; it stays here as well.

        Raises
        ------
        PagerError
            It was never here, or went when the budget was spent.
        """
        held, coming, traffic = self._known(key), self._coming.pop(key, None), self.traffic
        self._held.move_to_end(key)
        if coming is None:
            traffic.late += 1
        else:
            traffic.early += 1
        began = perf_counter()
        found = self._copy_back(held) if coming is None else coming.result() if isinstance(coming, Future) else coming
        if self._stream is not None:
            found, arrived = found
            torch.cuda.current_stream(self.device).wait_event(arrived)
            found.record_stream(torch.cuda.current_stream(self.device))
        traffic.stalled += perf_counter() - began
        traffic.fetched += 1
        traffic.bytes_back += held.nbytes
        return found

    def evict(self, key: Hashable) -> None:
        """Drop a page; its buffer is kept for the next of its size. `PagerError` for one that is not here."""
        held = self._known(key)
        self._settle(self._coming.pop(key, None))
        if held.ready is not None:
            held.ready.synchronize()
        del self._held[key]
        self._spare.setdefault(held.buffer.nbytes, []).append(held.buffer)

    def close(self) -> None:
        """End the thread."""
        if self._thread:
            self._thread.shutdown()

    def _in_place(self, key: Hashable, held: HeldPages, page: Tensor) -> bool:
        """Whether a page may be written over another of its form, which nobody is reading."""
        if self._stream is not None or key in self._coming:
            return False
        return held.page.shape == page.shape and held.page.dtype == page.dtype

    def _known(self, key: Hashable) -> HeldPages:
        held = self._held.get(key)
        if held is None:
            raise PagerError(f"no page {key!r} is in host memory", code="pager.no-page")
        return held

    def _buffer(self, size: int) -> Tensor:
        """A spare one of this size, or a new one, for which others go as far as the budget asks."""
        while not self._spare.get(size) and self._bytes + size > self.budget:
            if not self._let_go_spare():
                self.evict(next(iter(self._held)))
                self.traffic.dropped += 1
        if self._spare.get(size):
            return self._spare[size].pop()
        self._bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _let_go_spare(self) -> bool:
        """Give the memory of one spare buffer back, if there is one."""
        for size, buffers in self._spare.items():
            if buffers:
                buffers.pop()
                self._bytes -= size
                return True
        return False

    def _copy_out(self, kept: Tensor, data: Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            kept.copy_(data)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            kept.copy_(data, non_blocking=True)
            data.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record()
        torch.cuda.current_stream(self.device).wait_event(done)  # what overwrites the page next waits for the copy
        return done

    def _copy_back(self, held: HeldPages) -> Tensor | tuple[Tensor, torch.cuda.Event]:
        if self._stream is None:
            return held.page.clone()
        with torch.cuda.stream(self._stream):
            page = held.page.to(self.device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return page, arrived

    def _settle(self, coming: Future | tuple | None) -> None:
        """Wait for a copy that nobody wants any more: its buffer is about to be another's."""
        if isinstance(coming, Future):
            coming.result()
        elif coming is not None:
            coming[1].synchronize()

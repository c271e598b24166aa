"""Pages of tokens that sequences own or share, and how a pool of them is made compact.

Page tables with shared prefixes are those of PagedAttention (Kwon et al. 2023, arXiv 2309.06180, sections 4.2 and
4.3). Pages of equal size need no compaction to be usable, whichever of them are free; a pool is compacted so that its
end can be given back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kvlab.core.counts import counted
from kvlab.core.errors import PagerError, PoolExhausted
from kvlab.kvstore.paging.free_pages import FreePages


@dataclass
class PageTable:
    """Pages of a sequence in the order of its tokens, and how many tokens it has."""

    pages: list[int] = field(default_factory=list)
    tokens: int = 0


class PagePool:
    """A fixed number of pages in one slab of bytes.

    A page holds `page_tokens` tokens of all layers. Layers may take different bytes, as recipes give them: they share
    the page's number, so that one table serves all layers and no size has to be padded to another.

    Parameters
    ----------
    pages : int
        How many.
    page_tokens : int
        Tokens of a page.
    layer_bytes : sequence of int
        Bytes of a token in each layer, K and V together.
    device : str
        Where torch keeps them.
    wipe : bool
        Write zeros over a page that nobody holds any more.

    Attributes
    ----------
    data : Tensor
        uint8 [pages, bytes of a page], layer after layer within a page.
    """

    def __init__(
        self, pages: int, page_tokens: int, layer_bytes: Sequence[int], device: str = "cpu", wipe: bool = False
    ):
        self.pages = counted("pages", pages, least=1)
        self.page_tokens = counted("page_tokens", page_tokens, least=1)
        ends = [0]
        for size in layer_bytes:
            ends.append(ends[-1] + page_tokens * counted("bytes of a token in a layer", size))
        self._spans = list(pairwise(ends))
        self.data = torch.zeros(pages, ends[-1], dtype=torch.uint8, device=device)
        self.wipe = wipe
        self.tables: dict[Hashable, PageTable] = {}
        self.free = FreePages(range(pages))
        self._holders: list[set[Hashable]] = [set() for _ in range(pages)]

    def layer(self, number: int) -> Tensor:
        """All pages of a layer, uint8 [pages, page_tokens, bytes of a token], a view."""
        first, end = self._spans[number]
        return self.data[:, first:end].unflatten(1, (self.page_tokens, -1))

    def extend(self, sequence: Hashable, tokens: int) -> list[int]:
        """Room for more tokens of a sequence, which begins here if it is new; returns the pages that it gained.

        The last page is filled before another is taken. If it is shared and not full, its holder gets a copy of it
        first (copy on write), which counts among the pages gained.

        Raises
        ------
        PoolExhausted
            There are not as many free pages; nothing has changed.
        """
        table = self.tables.get(sequence) or PageTable()
        size, length = self.page_tokens, table.tokens + counted("tokens", tokens)
        copied = bool(tokens and table.tokens % size and len(self._holders[table.pages[-1]]) > 1)
        wanted = -(-length // size) - len(table.pages)
        if wanted + copied > len(self.free):
            raise PoolExhausted(f"{wanted + copied} pages are wanted and {len(self.free)} of {self.pages} are free")
        gained = [self._take(sequence) for _ in range(wanted + copied)]
        if copied:
            shared, table.pages[-1] = table.pages[-1], gained[0]
            self._holders[shared].discard(sequence)
            self.data[gained[0]].copy_(self.data[shared])
        table.pages += gained[copied:]
        table.tokens = length
        self.tables[sequence] = table
        return gained

    def fork(self, sequence: Hashable, twin: Hashable, tokens: int | None = None) -> None:
        """A new sequence that shares the pages of the first tokens of another, all of them by default.

        Raises
        ------
        PagerError
            The first is unknown or shorter, or the second is there already.
        """
        table = self._known(sequence)
        tokens = table.tokens if tokens is None else counted("tokens", tokens)
        if twin in self.tables or tokens > table.tokens:
            raise PagerError(f"{twin!r} is there already, or {sequence!r} has less than {tokens} tokens")
        self.tables[twin] = PageTable(table.pages[: -(-tokens // self.page_tokens)], tokens)
        for page in self.tables[twin].pages:
            self._holders[page].add(twin)

    def release(self, sequence: Hashable) -> None:
        """Forget a sequence; pages that nobody else holds are free. `PagerError` for one that is unknown."""
        for page in reversed(self._known(sequence).pages):
            holders = self._holders[page]
            holders.discard(sequence)
            if not holders:
                self.free.give(page)
                if self.wipe:
                    self.data[page].zero_()
        del self.tables[sequence]

    def slots(self, sequence: Hashable) -> Tensor:
        """Where each token of a sequence lies: page times `page_tokens`, plus its place in the page, int64 [tokens]."""
        table = self._known(sequence)
        pages = torch.tensor(table.pages, dtype=torch.int64)
        return (pages[:, None] * self.page_tokens + torch.arange(self.page_tokens)).flatten()[: table.tokens]

    def defragment(self, most: int | None = None) -> list[tuple[int, int]]:
        """Move the highest pages into the lowest holes; returns (from, to) of each page that was moved.

        The moves are the fewest that there can be, see `FreePages.compact`. With `most` at a time: tables are right
        after each call.
        """
        moves = self.free.compact(most)
        for source, target in moves:
            self.data[target].copy_(self.data[source])
            for sequence in self._holders[source]:
                pages = self.tables[sequence].pages
                pages[pages.index(source)] = target
            self._holders[source], self._holders[target] = self._holders[target], self._holders[source]
            if self.wipe:
                self.data[source].zero_()
        return moves

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.pages - len(self.free)

    @property
    def external(self) -> float:
        """Free pages below the highest live one, as a part of all pages up to it; 0 after `defragment`."""
        reach = self.free.reach
        return (reach - self.used) / reach if reach else 0.0

    @property
    def internal(self) -> float:
        """Slots of live pages that hold no token, as a part of all their slots. A shared page counts once."""
        filled: dict[int, int] = {}
        for table in self.tables.values():
            for index, page in enumerate(table.pages):
                filled[page] = max(filled.get(page, 0), min(self.page_tokens, table.tokens - index * self.page_tokens))
        slots = len(filled) * self.page_tokens
        return 1 - sum(filled.values()) / slots if slots else 0.0

    @property
    def reclaimable(self) -> int:
        """Bytes after the highest live page, which a shorter pool would not need."""
        return (self.pages - self.free.reach) * self.data.shape[1]

    def _known(self, sequence: Hashable) -> PageTable:
        if sequence not in self.tables:
            raise PagerError(f"the pool holds no sequence {sequence!r}", code="pager.no-sequence")
        return self.tables[sequence]

    def _take(self, sequence: Hashable) -> int:
        page = self.free.take()
        self._holders[page].add(sequence)
        return page

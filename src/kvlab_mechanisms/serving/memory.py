"""The paged KV memory of one worker, counted exactly and never page by page.

A sequence of n tokens takes ceil(n / page) pages (Kwon et al. 2023, PagedAttention, arXiv 2309.06180). While sequences
decode in step, each takes a page more once in `page` steps, at a phase of its own; counts of sequences by phase say in
O(page) how many pages any number of steps takes. Beginnings that were shared stay until their pages are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvlab.core.errors import UserError


@dataclass
class SharedPrefix:
    """A shared beginning: its pages, and how many sequences read them."""

    pages: int
    tokens: int
    readers: int


class Memory:
    """Pages of one worker.

    Parameters
    ----------
    pages : int
        That there are.
    page : int
        Tokens of one.
    """

    def __init__(self, pages: int, page: int):
        if pages < 1 or page < 1:
            raise UserError(
                f"{pages} pages of {page} tokens; allowed: at least 1 of each; give more memory", code="user.no-memory"
            )
        self.pages, self.page = pages, page
        self.free = pages  # of pages that nothing lies in; kept beginnings lie in theirs
        self.idle = 0  # pages of beginnings that nobody reads
        self.step = 0
        self.decoding = 0
        self._phase = [0] * page  # sequences by the step, modulo page, in which they take their next page
        self.kept: OrderedDict[int, SharedPrefix] = OrderedDict()

    def pages_of(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.page)

    @property
    def available(self) -> int:
        """Pages that can be had at once."""
        return self.free + self.idle

    def take(self, pages: int) -> bool:
        """Take pages, of beginnings that nobody reads too; False, and nothing changes, where there are too few."""
        if pages > self.free + self.idle:
            return False
        while pages > self.free:
            self._drop_oldest()
        self.free -= pages
        return True

    def give(self, pages: int) -> None:
        """Give pages back."""
        self.free += pages

    def _drop_oldest(self) -> None:
        name = next(name for name, one in self.kept.items() if not one.readers)
        pages = self.kept.pop(name).pages
        self.idle -= pages
        self.free += pages

    # ------------------------------------------------------------------------------ shared beginnings

    def lookup(self, prefix: int, tokens: int) -> int:
        """Tokens of a beginning that lie here already, whole pages of them."""
        one = self.kept.get(prefix)
        return min(one.tokens, tokens // self.page * self.page) if one else 0

    def hold(self, prefix: int) -> None:
        """Read a beginning that is here."""
        one = self.kept[prefix]
        if not one.readers:
            self.idle -= one.pages
        one.readers += 1
        self.kept.move_to_end(prefix)

    def keep(self, prefix: int, tokens: int) -> int:
        """Let a beginning that was just computed stay for others, read by its sequence; its pages, which move to it."""
        pages = tokens // self.page
        if prefix in self.kept or not pages:
            return 0
        self.kept[prefix] = SharedPrefix(pages, pages * self.page, 1)
        return pages

    def release(self, prefix: int) -> None:
        """Stop reading a beginning."""
        one = self.kept[prefix]
        one.readers -= 1
        if not one.readers:
            self.idle += one.pages

    # ------------------------------------------------------------------------------ sequences that decode

    def join(self, tokens: int) -> int:
        """Let a sequence of so many tokens decode from the next step on; the phase to leave with."""
        phase = (self.step + (-tokens) % self.page) % self.page
        self._phase[phase] += 1
        self.decoding += 1
        return phase

    def leave(self, phase: int) -> None:
        """A sequence stops decoding; its pages are given back apart."""
        self._phase[phase] -= 1
        self.decoding -= 1

    def needed(self, steps: int) -> int:
        """Pages that so many steps of all that decode take."""
        turns, rest = divmod(steps, self.page)
        start = self.step % self.page
        end = start + rest
        some = sum(self._phase[start:end])
        if end > self.page:
            some += sum(self._phase[: end - self.page])
        return turns * self.decoding + some

    def steps_left(self, most: int) -> int:
        """Steps, at most so many, that the pages last for."""
        room = self.available
        if -(-most // self.page) * self.decoding <= room or self.needed(most) <= room:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.needed(middle) <= room else (low, middle)
        return low

    def advance(self, steps: int) -> None:
        """All that decode take their pages of so many steps, which `steps_left` allowed."""
        pages = self.needed(steps)
        if not self.take(pages):
            raise UserError(f"{pages} pages are needed and {self.available} free; ask `steps_left` first")
        self.step += steps

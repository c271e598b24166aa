"""Which pages of a pool are free, in which order they are handed out, and which would move to make the rest compact."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.core.errors import ParamsError


class FreePages:
    """A stack of free pages: the one that was given back last is still in a core's cache, and goes first.

    Parameters
    ----------
    order : sequence of int
        The order in which pages are handed out at first, any permutation of 0, 1, 2, ..

    Raises
    ------
    ParamsError
        `order` is no permutation.
    """

    def __init__(self, order: Sequence[int]):
        if sorted(order) != list(range(len(order))):
            raise ParamsError(
                f"the order of the pages has to name each of 0..{len(order) - 1} once, not {list(order)}",
                code="params.no-permutation",
            )
        self.stack = list(order)[::-1]
        self._live = bytearray(len(order))  # find() and rfind() run over it at the speed of memory

    def __len__(self) -> int:
        return len(self.stack)

    def take(self) -> int:
        """A free page, no longer free."""
        page = self.stack.pop()
        self._live[page] = 1
        return page

    def give(self, page: int) -> None:
        """A page is free again, and the next to be handed out."""
        self._live[page] = 0
        self.stack.append(page)

    def compact(self, most: int | None = None) -> list[tuple[int, int]]:
        """(from, to) of pages that move: the highest live one into the lowest hole, until they cross.

        Every page whose number is not below the number of live pages moves once, and no other: the fewest moves that
        there can be. Here they are done; the caller moves bytes and tables. At most `most` at a time.
        """
        moves: list[tuple[int, int]] = []
        hole, top = -1, len(self._live)
        while most is None or len(moves) < most:
            hole, top = self._live.find(0, hole + 1), self._live.rfind(1, 0, top)
            if hole < 0 or hole > top:
                break
            self._live[hole], self._live[top] = 1, 0
            moves.append((top, hole))
        if moves:
            self.stack = [page for page in range(len(self._live) - 1, -1, -1) if not self._live[page]]
        return moves

    @property
    def reach(self) -> int:
        """Pages up to the highest one that is not free, itself included."""
        return self._live.rfind(1) + 1

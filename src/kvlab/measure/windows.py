"""A window as the measuring loop takes it: its tokens, what of them is stored, and what is scored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from kvlab.core.recipe import Cell
from kvlab.core.records import sha256
from kvlab.text.corpus import TokenWindows


@dataclass(frozen=True)
class Window:
    """Tokens of which the first `context` are stored, and the predictions from row `first` on that are scored.

    Row 0 predicts the token after the first token that follows the context, as in `scoring.WindowRun`.

    Parameters
    ----------
    text : str
        Which windows it is one of: ``test``, ``other``, ``calib``, or ``needle``.
    number : int
        Its place among them; codecs are seeded by it.
    ids : tuple of int
    context : int
    first : int
    """

    text: str
    number: int
    ids: tuple[int, ...]
    context: int
    first: int = 0

    @cached_property
    def identity(self) -> str:
        """Digest of everything that decides what is scored: the tokens, where they are cut, and the number."""
        cut = f"{self.number} {self.context} {self.first} "
        return sha256((cut + " ".join(map(str, self.ids))).encode())


def windows_of(windows: TokenWindows, text: str) -> list[Window]:
    """All windows of a text, or of the calibration split."""
    rows = windows.scored(text).tolist()
    return [Window(text, number, tuple(ids), windows.context) for number, ids in enumerate(rows)]


def windows_for(cells: Iterable[Cell], windows: TokenWindows) -> list[Window]:
    """The windows that some cells score, text by text, in the order in which the cells name the texts."""
    most: dict[str, int] = {}
    for cell in cells:
        most[cell.text] = max(most.get(cell.text, 0), cell.windows)
    return [window for text, count in most.items() for window in windows_of(windows, text)[:count]]

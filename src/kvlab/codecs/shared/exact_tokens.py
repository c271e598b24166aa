"""Which tokens of a cache a recipe leaves as they are. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.core.recipe import StreamRecipe


@dataclass(frozen=True)
class ExactTokens:
    """Which tokens stay as they are; `block` is 0 where tokens that fill no block are coded all the same."""

    sink: int = 0
    recent: int = 0
    block: int = 0

    @classmethod
    def of(cls, recipe: StreamRecipe) -> ExactTokens:
        """As a stream's recipe says; a codec whose settings do not speak of it keeps nothing."""
        block = getattr(recipe, "block_size", 0) if getattr(recipe, "ragged", "coded") == "exact" else 0
        return cls(getattr(recipe, "sink", 0), getattr(recipe, "recent", 0), block)

    def __bool__(self) -> bool:
        return self != ExactTokens()

    def split(self, tokens: int) -> tuple[int, int, int]:
        """How many of `tokens` tokens are kept first, coded, and kept last."""
        sink = min(self.sink, tokens)
        recent = min(self.recent, tokens - sink)
        middle = tokens - sink - recent
        loose = middle % self.block if self.block else 0
        return sink, middle - loose, recent + loose

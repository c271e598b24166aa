"""What a layer reads, as plain data, and what that costs by its formula. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.core.errors import UserError


@dataclass(frozen=True)
class Pattern:
    """What a query reads of the tokens up to itself; subclasses say which.

    Costs are of one layer and one KV head's group of `heads` query heads; `keys` counts what the query at position t
    (0 the first) reads at most, `scored` the vectors that it looks at to choose.
    """

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "score" and (isinstance(value, bool) or not isinstance(value, int) or value < self.least(name)):
                raise UserError(
                    f"{self.name}: {name} is {value!r}; allowed: a whole number, {self.least(name)} or more"
                )

    @staticmethod
    def least(field: str) -> int:
        """The smallest value of a field."""
        return 0 if field in ("top_k", "sinks", "exact") else 1

    @property
    def name(self) -> str:
        """What it is, with its settings, as the command line takes it."""
        settings = ",".join(f"{name}={value}" for name, value in vars(self).items())
        return self.kind + (f":{settings}" if settings else "")

    kind = "pattern"

    def keys(self, t: int) -> int:
        """Key and value vectors that the query at position t reads at most."""
        return t + 1

    def scored(self, t: int) -> int:
        """Vectors of head_dim numbers that are looked at to choose among the keys."""
        return 0

    @property
    def indexed(self) -> float:
        """Vectors that are stored beside K and V for each token and KV head, to choose by or to read in their place."""
        return 0.0

    def flops(self, tokens: int, heads: int, head_dim: int) -> int:
        """Multiplications and additions of a causal pass over so many tokens, in one layer."""
        pairs = sum(2 * self.keys(t) + self.scored(t) for t in range(tokens))
        return 2 * heads * head_dim * pairs

    def bytes_read(self, t: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
        """Of the cache, by the query at position t in one layer."""
        return kv_heads * head_dim * itemsize * (2 * self.keys(t) + self.scored(t))


@dataclass(frozen=True)
class Full(Pattern):
    """Everything: the unmodified model."""

    kind = "full"


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """The last `window` tokens, the query's own among them."""

    window: int = 256

    kind = "window"

    def keys(self, t: int) -> int:
        """See `Pattern`."""
        return min(self.window, t + 1)


@dataclass(frozen=True)
class BlockSparse(Pattern):
    """The `top_k` blocks of `block` tokens that score best, the last `window` tokens and the `sinks` first blocks.

    `score` is ``mean`` or ``bounds``; see `block_sparse`.
    """

    block: int = 64
    top_k: int = 4
    window: int = 64
    sinks: int = 1
    score: str = "mean"

    kind = "block_sparse"

    def __post_init__(self):
        super().__post_init__()
        if self.score not in ("mean", "bounds"):
            raise UserError(f"{self.kind}: score is {self.score!r}; allowed: mean, bounds")

    @property
    def indexed(self) -> float:
        """See `Pattern`."""
        return (1 + (self.score == "bounds")) / self.block

    def keys(self, t: int) -> int:
        """See `Pattern`; the query's own block and its window may overlap, the longer is counted."""
        local = max(self.window, t % self.block + 1)
        return min(local + (self.top_k + self.sinks) * self.block, t + 1)

    def scored(self, t: int) -> int:
        """See `Pattern`; bounds are two vectors a block."""
        return (1 + (self.score == "bounds")) * (t // self.block if self.top_k else 0)


@dataclass(frozen=True)
class ChunkSummary(Pattern):
    """The query's own chunk, `exact` before it and the `sinks` first ones as they are; of `top_k` others summaries."""

    chunk: int = 64
    top_k: int = 4
    exact: int = 1
    sinks: int = 1

    kind = "chunk_summary"

    @property
    def indexed(self) -> float:
        """See `Pattern`."""
        return 2 / self.chunk

    def keys(self, t: int) -> int:
        """See `Pattern`; a summary is a key and a value."""
        past = t // self.chunk
        whole = min(past, self.exact + self.sinks)
        return t % self.chunk + 1 + whole * self.chunk + min(self.top_k, past - whole)

    def scored(self, t: int) -> int:
        """See `Pattern`; the summaries' keys."""
        return max(0, t // self.chunk - self.exact - self.sinks) if self.top_k else 0


PATTERNS = {one.kind: one for one in (Full, SlidingWindow, BlockSparse, ChunkSummary)}

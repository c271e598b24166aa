"""What answers a task's requests: a model on an engine, as it is or with something done to its cache. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["score", "write"]


class ScoreRequest(NamedTuple):
    """A request for how likely a text is: its tokens after those of its context."""

    context: list[int]
    continuation: list[int]


class WriteRequest(NamedTuple):
    """A request for a text: at most `tokens` tokens after the context, until one of `stops` is in it."""

    context: list[int]
    tokens: int
    stops: list[str]


class ScoreResult(NamedTuple):
    """Log-probability of each token of a continuation (nats), and whether each was the most likely one."""

    logprobs: list[float]
    greedy: bool


class WriteResult(NamedTuple):
    """The greedy text, and the log-probability of each of its tokens (nats)."""

    text: str
    logprobs: list[float]


class CacheUse(NamedTuple):
    """What the cache went through since `Side.begin`; numbers of fires are 0 where no codec of ours runs.

    `kv_bytes` counts every stored byte, `kv_values` the K and V elements that they stand for, both summed over all
    requests.
    """

    fires: int
    expected_fires: int
    kv_bytes: int
    kv_values: int

    @property
    def bits_per_value(self) -> float:
        """Stored bits for each K and V element."""
        return 8 * self.kv_bytes / self.kv_values


class Side(ABC):
    """A model on an engine, with its cache as it is or with something done to it.

    Attributes
    ----------
    what : str
        What is done to the cache, in a word for messages: a codec, a dtype, or ``no codec``.
    kv_cache_dtype : str
        What the engine's cache was found to hold; never ``auto``.
    cache_class : str
        The class that holds it.
    """

    what: str
    kv_cache_dtype: str
    cache_class: str

    @abstractmethod
    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Score requests, in their order.

        Raises
        ------
        CodecNotActive
            A codec fired less often than it should have, or its output was not read.
        """

    @abstractmethod
    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Answer requests greedily, in their order; raises as `score`."""

    @abstractmethod
    def begin(self) -> None:
        """Count from here."""

    @abstractmethod
    def seen(self) -> CacheUse:
        """What was counted; `CodecNotActive` when a codec was not active throughout."""

    def refuse_blind(self, kind: Kind) -> None:  # noqa: B027 (most see every kind)
        """`CapabilityError` for a kind of request that would show nothing of what is done to the cache."""


class Sides(NamedTuple):
    """What is compared, and by stream what a one-bit codec makes of the plain one."""

    plain: Side
    variant: Side
    one_bit: dict[str, Side]

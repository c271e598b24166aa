"""The part `kvstore.policy`: bounded pools, who stays in them, and on how many needles that is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kvlab.core.params import Params, Section, at_most

Share = Annotated[float, Field(gt=0, le=1)]
Policy = Literal["lru", "qk", "oracle", "random", "sign_bit"]


class PolicyStudy(Section):
    """Which chunks a bounded pool should keep: needles found, and attention mass kept."""

    chunk_tokens: int = Field(default=8, ge=1, description="tokens of a chunk")
    sink_chunks: int = Field(default=1, ge=0, description="first chunks, which always stay")
    tail_chunks: int = Field(default=1, ge=0, description="chunks before the head, which always stay")
    every: int = Field(default=1, ge=1, description="tokens after which the pool is chosen anew")
    policies: tuple[Policy, ...] = Field(
        default=("lru", "qk", "oracle", "random", "sign_bit"), min_length=1, description="who stays"
    )
    pools: tuple[Share, ...] = Field(
        default=(0.25, 0.1), min_length=1, description="sizes of the pool, as shares of the context"
    )
    needles: int = Field(
        default=64,
        ge=2,
        description="items, from the first on, of those that the gate's rows are judged on; at most, and if not given"
        " cut to, mechanisms.needles",
    )

    def fitted(self, params: Params) -> PolicyStudy:
        """As many needles as there are."""
        return self.unsaid(needles=min(self.needles, params.mechanisms.needles))

    def problems(self, params: Params) -> Iterator[str]:
        """More needles than there are."""
        yield from at_most("kvstore.policy.needles", self.needles, "mechanisms.needles", params.mechanisms.needles)

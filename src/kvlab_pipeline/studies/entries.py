"""What the entries of ``metrics.json`` are made of: numbers with their intervals, and the cells that they compare.

Each study declares its own part in ``studies/X/schema.py``; `kvlab_pipeline.report.schema` composes them.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvlab.core.recipe import DType, Engine, Protocol, Stream


class Entry(BaseModel):
    """A value of ``metrics.json``: immutable, closed against unknown fields, finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Interval(Entry):
    """A number with its two-sided interval, by resampling windows."""

    value: float
    low: float
    high: float
    n_windows: int
    """Windows of text that it was measured on; they are what is resampled."""
    n_tokens: int
    """Tokens in these windows."""
    resolvable: float
    """Half the interval's width: the smallest effect that this many windows can tell from none."""
    method: str
    """How the interval was made: bca, percentile, t (Student's, over windows), exact (a rate of 0 or 1) or mover."""
    confidence: float
    """Of the interval, two-sided."""
    n_documents: int | None
    """Documents that the windows are of: these are what is resampled; null where every window stands for itself."""

    @model_validator(mode="after")
    def _inside(self) -> Interval:
        """A value lies in its own interval, up to rounding."""
        room = 1e-9 * (1 + abs(self.value))
        if not self.low - room <= self.value <= self.high + room:
            raise ValueError(f"value {self.value:g} is outside its own interval, {self.low:g} to {self.high:g}")
        return self


class Reference(Entry):
    """A cell that an entry compares: its id, where it was measured, and what it stores."""

    cell_id: str
    study: str
    label: str
    engine: Engine
    dtype: DType
    protocol: Protocol
    stream: Stream
    bits_per_value: float | None
    """Of the whole cache; null for a cell that stores nothing."""


Compared = tuple[tuple[Reference, ...], tuple[Reference, ...]]
"""What is set against what; the cells of one side are added up."""

PValue = Field(ge=0, le=1)

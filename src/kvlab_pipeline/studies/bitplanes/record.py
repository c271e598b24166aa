"""What the study of bit planes leaves. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvlab.core.codec_settings import Frozen
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.studies.kvstore_params import BitplanesStudy
from kvlab_pipeline.studies.record import StudyRecord

Basis = Literal["rotated", "raw"]
COMPARED = 0.1  # the budget, or the nearest to it, at which arms and heads are held against each other


def compared_at(budgets: Sequence[float]) -> int:
    """Which of the budgets that is."""
    return min(range(len(budgets)), key=lambda i: abs(budgets[i] - COMPARED))


class ArmQuantity(Frozen):
    """One quantity of one arm: its mean over queries with an interval over windows, and the means of each head.

    `heads` is [layers][query heads].
    """

    overall: Estimate
    heads: tuple[tuple[float, ...], ...]


class ArmRecord(Frozen):
    """One way to score keys.

    `group` is what was asked for and `width` how many numbers of this model's keys share a norm, None without norms.
    `bits_per_key` counts every stored bit of a key, norms included; None of an arm that stores none.
    `token`, `chunk` and `forced` are the shares of the attention mass on what is kept, by budget; `needed` is the
    share of the tokens that holds 90 % of the mass. `saturated` is the share of codes at either end of the table.
    """

    name: str
    basis: Basis
    group: int | None
    width: int | None
    bits_per_key: float | None
    saturated: float | None
    spearman: ArmQuantity
    token: tuple[ArmQuantity, ...]
    chunk: tuple[ArmQuantity, ...]
    forced: tuple[ArmQuantity, ...]
    needed: ArmQuantity

    @property
    def label(self) -> str:
        """Its name, with its group."""
        return self.name if self.group is None else f"{self.name}, {self.group}"


class Difference(Frozen):
    """Arm `a` minus arm `b`, paired by query: `what` is ``spearman``, or ``token`` or ``chunk`` at a budget."""

    what: Literal["spearman", "token", "chunk"]
    budget: float | None
    a: str
    b: str
    basis: Basis
    other_basis: Basis
    difference: Estimate


class BudgetUse(Frozen):
    """What the variant with forced tokens keeps at a budget: mean tokens, and what the published code kept.

    `slipped` is the mean number of tokens where an empty remainder is taken for all of them, as it was there.
    """

    budget: float
    asked: float
    kept: float
    slipped: float


class BitplanesRecord(StudyRecord):
    """The JSON of the study.

    `ceiling` is the best that any choice of chunks can reach, by budget; the best choice of tokens is the arm
    ``full``. `entropy` (nats) and `largest` are means of the attention weights.
    """

    settings: BitplanesStudy
    dtype: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: tuple[int, ...]
    confidence: float
    arms: tuple[ArmRecord, ...]
    controls: tuple[ArmRecord, ...]
    ceiling: tuple[ArmQuantity, ...]
    differences: tuple[Difference, ...]
    spent: tuple[BudgetUse, ...]
    entropy: float
    largest: float


RECORD = BitplanesRecord

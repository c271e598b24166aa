"""What the study of residency policies leaves. Torch-free."""

from __future__ import annotations

from typing import Literal

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import StorageError
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.studies.kvstore_params import PolicyStudy

Prefill = Literal["bounded", "restored"]
REFERENCE = "lru"  # the policy that the others are held against
FORESIGHT = "foresight"  # no policy: the pool is what attention is about to look at


class NeedleResult(Frozen):
    """One needle under one policy.

    `question` and `answer` are the shares of attention that lay on chunks in the pool while the question was read and
    the answer computed. The attention is that of the run that has room for everything, token by token: means over the
    tokens, layers and query heads. `held` is the share of the planted line's chunks that were in the pool when the
    first token of the answer was computed, `page_ins` how many chunks came back into the pool after the context.
    """

    found: bool
    question: float
    answer: float
    held: float
    page_ins: int


class Third(Frozen):
    """Needles planted in one third of the context, from `low` to `high` of it: how many there are, how many found."""

    low: float
    high: float
    items: int
    found: int


class Against(Frozen):
    """Paired differences to the reference policy in the same pool."""

    found: Estimate
    question: Estimate
    answer: Estimate


class PolicyArm(Frozen):
    """One policy in a pool of one size; `policy` and `pool` are None where the whole context has room.

    The policy ``foresight`` is none that could be had: before each token the pool is chosen by the attention that this
    token paid where everything had room.

    `prefill` says how the context came: ``bounded``, through the pool itself, so that later tokens were computed
    while earlier ones were out of it; or ``restored``, computed in whole and restored into the pool from a snapshot.
    """

    policy: str | None
    pool: float | None
    blocks: int
    prefill: Prefill
    items: tuple[NeedleResult, ...]
    found: Estimate
    question: Estimate
    answer: Estimate
    held: Estimate
    page_ins: float
    thirds: tuple[Third, ...]
    against: Against | None


class PolicyRecord(Frozen):
    """The JSON of the study; `depths` are where the needles stand, as shares of the context."""

    model: str
    model_hash: str
    needles_hash: str
    versions: dict[str, str]
    device: str
    dtype: str
    settings: PolicyStudy
    context: int
    question: int
    confidence: float
    depths: tuple[float, ...]
    arms: tuple[PolicyArm, ...]

    def arm(self, policy: str | None, pool: float | None, prefill: Prefill) -> PolicyArm:
        """The one arm of this policy; `StorageError` when it was not measured."""
        for arm in self.arms:
            if (arm.policy, arm.pool, arm.prefill) == (policy, pool, prefill):
                return arm
        raise StorageError(f"the record holds no {policy} in a pool of {pool}, {prefill}", code="storage.no-arm")


RECORD = PolicyRecord

"""The tables of POLICY.md. Torch-free."""

from __future__ import annotations

from kvlab.output.format import DASH, percent
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import Column, table_if_any
from kvlab_pipeline.studies.policy.record import FORESIGHT, PolicyArm, PolicyRecord

NAMES = {None: "everything in the pool", FORESIGHT: "foresight"}


def parts(record: PolicyRecord) -> dict[str, str | None]:
    """What the template places, by name."""
    everything = record.arm(None, None, "bounded")
    bounded, restored = (
        [arm for arm in record.arms if arm.policy is not None and arm.prefill == prefill]
        for prefill in ("bounded", "restored")
    )
    found = {
        "pool": _pool,
        "chunks": cols.number("blocks"),
        "policy": _policy,
        "needles found, %": cols.percent("found"),
        "planted line in the pool, %": cols.percent("held"),
        "mass of the question's tokens, %": cols.percent("question"),
        "of the answer's, %": cols.percent("answer"),
        "chunks that came back": cols.number("page_ins"),
    }
    more = {
        "pool": _pool,
        "policy": _policy,
        "needles found": cols.percent("against.found", signed=True),
        "mass of the question's tokens": cols.percent("against.question", signed=True),
        "of the answer's": cols.percent("against.answer", signed=True),
    }
    by_depth: dict[str, Column] = {
        "pool": _pool,
        "prefill": lambda arm: DASH if arm.policy is None else arm.prefill,
        "policy": _policy,
    }
    for at, third in enumerate(everything.thirds):
        by_depth[f"{percent(third.low, 0)} to {percent(third.high, 0)}"] = lambda arm, at=at: (
            f"{arm.thirds[at].found} of {arm.thirds[at].items}"
        )
    return {
        "bounded": table_if_any([everything, *bounded], found),
        "restored": table_if_any([everything, *restored], found),
        "bounded_more": table_if_any([arm for arm in bounded if arm.against], more),
        "restored_more": table_if_any([arm for arm in restored if arm.against], more),
        "depths": table_if_any([everything, *bounded, *restored], by_depth),
    }


def _pool(arm: PolicyArm) -> str:
    return "all" if arm.pool is None else percent(arm.pool)


def _policy(arm: PolicyArm) -> str:
    return NAMES.get(arm.policy) or f"`{arm.policy}`"

"""Needles asked of a bounded pool, policy by policy, and how much of the attention the pool kept.

The context comes in one of two ways. Prefilled through the pool, as a machine that never has room for more would, all
that follows an evicted chunk is computed without it. Restored from a snapshot that was computed in whole, every chunk
is what it should be, and the policy alone decides what is at hand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from kvlab.core.errors import ParamsError
from kvlab.core.model import check_window, resolve
from kvlab.core.params import Params
from kvlab.core.records import forget, versions, write_json
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.snapshot import read as snapshots
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.text import needles
from kvlab.text.needles import Needle
from kvlab_pipeline.studies.kvstore_params import PolicyStudy
from kvlab_pipeline.studies.policy.asking import ask, columns
from kvlab_pipeline.studies.policy.record import (
    FORESIGHT,
    REFERENCE,
    Against,
    NeedleResult,
    PolicyArm,
    PolicyRecord,
    Prefill,
    Third,
)

THIRDS = 3
NEVER = 1 << 40  # tokens between two choices of the pool, where it is chosen from outside


class PolicyVariant(NamedTuple):
    """One policy in one pool, the context prefilled in one way; without a policy, everything has room."""

    policy: str | None
    pool: float | None
    blocks: int
    prefill: Prefill


def measure(params: Params, needles_path: Path, out: Path) -> None:
    """Ask every needle of every policy and write the record; `params.kvstore.policy` says what is asked.

    Raises
    ------
    ParamsError
        More needles are asked for than there are.
    PoolTooSmall
        A share of the context is less than the pager's floor.
    CapabilityError
        The model cannot be paged.
    """
    torch.set_num_threads(params.jobs.threads)
    settings, info = params.kvstore.policy, resolve(params.model)
    planted = needles.load(needles_path, info.model_hash)
    if settings.needles > len(planted.items):
        raise ParamsError(
            f"{settings.needles} needles are asked for, and there are {len(planted.items)}",
            code="params.too-few-needles",
        )
    items = planted.items[: settings.needles]
    longest = max(len(needles.sequence(item)[0]) for item in items)
    check_window(info, longest)
    forget(out)
    model = PagedModel.load(info, params.kvstore.dtype)
    given = arms(settings, planted.context, longest)
    answers: dict[PolicyVariant, list[NeedleResult]] = {arm: [] for arm in given}
    for number, item in enumerate(tqdm(items, desc="policies", unit="needle")):
        for arm, result in asked_of(model, settings, given, number, item):
            answers[arm].append(result)
    depths = [item.depth for item in items]
    bootstrap = Bootstrap(**params.stats.model_dump())
    record = PolicyRecord(
        model=info.slug,
        model_hash=info.model_hash,
        needles_hash=planted.needles_hash,
        versions=versions(),
        device=model.device,
        dtype=params.kvstore.dtype,
        settings=settings,
        context=planted.context,
        question=max(len(item.question) for item in items),
        confidence=params.stats.confidence,
        depths=depths,
        arms=[summary(arm, answers, depths, bootstrap) for arm in given],
    )
    write_json(out, record.model_dump(mode="json"))


def arms(settings: PolicyStudy, context: int, longest: int) -> list[PolicyVariant]:
    """The whole context first; then every policy in every pool, prefilled in both ways."""
    room = -(-longest // settings.chunk_tokens)
    floor = settings.sink_chunks + settings.tail_chunks + 2  # of the pager, had the context fewer chunks
    pools = [(share, config(settings, blocks_of(settings, share, context)).blocks) for share in settings.pools]
    return [
        PolicyVariant(None, None, max(room, floor), "bounded"),
        *(
            PolicyVariant(policy, *pool, prefill)
            for prefill in ("bounded", "restored")
            for pool in pools
            for policy in (*settings.policies, *([FORESIGHT] if prefill == "restored" else []))
        ),
    ]


def blocks_of(settings: PolicyStudy, share: float, context: int) -> int:
    """Chunks in a share of the context, rounded down; a hair below a whole number is rounding."""
    return int(share * context / settings.chunk_tokens + 1e-9)


def config(settings: PolicyStudy, blocks: int) -> PagerConfig:
    """A pool of so many blocks."""
    return PagerConfig(
        blocks * settings.chunk_tokens, settings.chunk_tokens, settings.sink_chunks, settings.tail_chunks
    )


def asked_of(
    model: PagedModel, settings: PolicyStudy, given: Sequence[PolicyVariant], number: int, needle: Needle
) -> Iterator[tuple[PolicyVariant, NeedleResult]]:
    """One needle under every arm, the one with room for everything first: it is the reference of all others.

    One prefill of the whole context serves all that are restored.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, reference = Path(folder) / "context.kvsnap", None
        for arm in given:
            run = standing(model, settings, arm, number, needle, path)
            if arm.policy is None:
                run.save(path)
            result, reference = ask(run, needle, reference, ahead=arm.policy == FORESIGHT)
            yield arm, result


def standing(
    model: PagedModel, settings: PolicyStudy, arm: PolicyVariant, number: int, needle: Needle, path: Path
) -> PagedRun:
    """A run after a needle's context; of the restored ones, what the snapshot does not hold is prefilled."""
    pool, ahead = config(settings, arm.blocks), arm.policy == FORESIGHT
    policy = "oracle" if ahead else arm.policy or REFERENCE
    how = {"every": NEVER if ahead else settings.every, "seed": number}
    if arm.prefill == "bounded":
        run, rest = PagedRun(model, pool, policy, **how), needle.context
    else:
        with snapshots.open(path) as snapshot:
            run, _ = PagedRun.restored(model, snapshot, snapshot.length, pool, policy, **how)
        rest = needle.context[len(run.tokens) :]
    if rest:
        run.extend(rest)
    return run


def summary(
    arm: PolicyVariant, answers: dict[PolicyVariant, list[NeedleResult]], depths: Sequence[float], bootstrap: Bootstrap
) -> PolicyArm:
    """An arm's means with their intervals over needles, and its differences to the reference policy."""
    mine = by_item(answers[arm])
    reference = arm._replace(policy=REFERENCE)
    against = None
    if arm.policy not in (None, REFERENCE) and reference in answers:
        theirs = by_item(answers[reference])
        against = Against(**{name: bootstrap.difference(mine[name], theirs[name]) for name in Against.model_fields})
    return PolicyArm(
        **arm._asdict(),
        items=answers[arm],
        found=bootstrap.rate(mine["found"]),
        **{name: bootstrap.mean(mine[name]).within(0.0, 1.0) for name in ("question", "answer", "held")},
        page_ins=float(mine["page_ins"].means.mean()),
        thirds=thirds(answers[arm], depths),
        against=against,
    )


def by_item(results: Sequence[NeedleResult]) -> dict[str, Column]:
    """Numbers of the items as columns, an item a window: each has a text of its own."""
    place = np.arange(len(results))
    return {name: Column.of(place, place, values) for name, values in columns(results).items()}


def thirds(results: Sequence[NeedleResult], depths: Sequence[float]) -> tuple[Third, ...]:
    """Needles found, by the third of the context that they stand in."""
    where = [min(int(depth * THIRDS), THIRDS - 1) for depth in depths]
    found = []
    for third in range(THIRDS):
        inside = [one.found for one, place in zip(results, where, strict=True) if place == third]
        found.append(Third(low=third / THIRDS, high=(third + 1) / THIRDS, items=len(inside), found=sum(inside)))
    return tuple(found)

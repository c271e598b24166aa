"""Needles asked of a bounded pool, policy by policy, and how much of the attention the pool kept.

The context comes in one of two ways. Prefilled through the pool, as a machine that never has room for more would, all
that follows an evicted chunk is computed without it. Restored from a snapshot that was computed in whole, every chunk
is what it should be, and the policy alone decides what is at hand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.core.errors import ParamsError
from kvlab.core.model import check_window, resolve
from kvlab.core.params import Params
from kvlab.core.records import forget, versions, write_json
from kvlab.engines.hooks import installed
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.queries import LastQueries, attention_mass
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.snapshot import read as snapshots
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.text import needles
from kvlab.text.needles import Needle
from kvlab_pipeline.studies.kvstore_params import PolicyStudy
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
    size = settings.chunk_tokens
    floor = settings.sink_chunks + settings.tail_chunks + 2  # of the pager, had the context fewer chunks
    found = [PolicyVariant(None, None, max(-(-longest // size), floor), "bounded")]
    for prefill in ("bounded", "restored"):
        for share in settings.pools:
            # Chunks in a share of the context, rounded down; a hair below a whole number is rounding.
            blocks = config(settings, int(share * context / size + 1e-9)).blocks
            policies = [*settings.policies, *([FORESIGHT] if prefill == "restored" else [])]
            found += [PolicyVariant(policy, share, blocks, prefill) for policy in policies]
    return found


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
    mine = columns(answers[arm])
    reference = arm._replace(policy=REFERENCE)
    against = None
    if arm.policy not in (None, REFERENCE) and reference in answers:
        theirs = columns(answers[reference])
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


def columns(items: Sequence[NeedleResult]) -> dict[str, Column]:
    """Every number of the items as a column, an item a window: each has a text of its own."""
    place = np.arange(len(items))
    return {
        name: Column.of(place, place, np.array([getattr(item, name) for item in items], dtype=np.float64))
        for name in NeedleResult.model_fields
    }


def thirds(results: Sequence[NeedleResult], depths: Sequence[float]) -> tuple[Third, ...]:
    """Needles found, by the third of the context that they stand in."""
    where = [min(int(depth * THIRDS), THIRDS - 1) for depth in depths]
    found = []
    for third in range(THIRDS):
        inside = [one.found for one, place in zip(results, where, strict=True) if place == third]
        found.append(Third(low=third / THIRDS, high=(third + 1) / THIRDS, items=len(inside), found=sum(inside)))
    return tuple(found)


# One needle, one run: the question token by token, the answer greedily, and what of the attention the pool kept.


class WatchedRun:
    """A run whose forwards of one token are watched.

    Parameters
    ----------
    run : PagedRun
        After the context.
    reference : sequence of Tensor, optional
        The `masses` of a run that had everything in its pool, forward by forward; its own where it is that run.
    ahead : bool
        The pool is chosen by the reference's attention at the very token that is to be computed.

    Attributes
    ----------
    masses : list of Tensor
        float64 [chunks] a forward: the attention that its token would pay to each chunk were all of them there.
    shares : list of float
        How much of the reference's attention lay on chunks in the pool.
    """

    def __init__(self, run: PagedRun, reference: Sequence[Tensor] | None = None, ahead: bool = False):
        self.run, self.ahead, self.queries = run, ahead, LastQueries(run.model)
        self.masses: list[Tensor] = []
        self.reference = self.masses if reference is None else reference
        self.shares: list[float] = []
        self.resident: tuple[int, ...] = ()

    def forward(self, token: int) -> int:
        """Feed one token; the most likely one after it."""
        number, pager = len(self.shares), self.run.pager
        if self.ahead:
            pager.set_scores(self.reference[number][: pager.sealed].tolist())
            pager.reselect()
        with self.queries.watching(), installed([(self.run.model.model, self._note)], before=True):
            logits = self.run.extend([token])
        if self.reference is self.masses:
            self.masses.append(self._mass())
        self.shares.append(float(self.reference[number][list(self.resident)].sum()))
        return int(logits.argmax())

    def _note(self, *_: object) -> None:
        # the pool as attention reads it: places are made before the forward, and the pool is chosen anew after it
        self.resident = self.run.pager.resident

    def _mass(self) -> Tensor:
        run = self.run
        queries = self.queries.at(len(run.tokens) - 1)
        return attention_mass(queries, run.keys(), run.pager.geometry.chunk_tokens, run.model.scaling)


def ask(
    run: PagedRun, needle: Needle, reference: Sequence[Tensor] | None = None, ahead: bool = False
) -> tuple[NeedleResult, Sequence[Tensor]]:
    """Ask a run that stands after the context.

    The answer is found when greedy decoding writes all of its tokens. The pool is chosen anew as the run's policy and
    its `every` say; the question comes token by token, so that a policy has seen its beginning when the answer is
    computed.

    Parameters
    ----------
    run : PagedRun
    needle : Needle
    reference, ahead
        See `WatchedRun`.

    Returns
    -------
    NeedleResult, sequence of Tensor
        And the reference's masses.
    """
    seen, before = WatchedRun(run, reference, ahead), run.pager.stats.page_ins
    written = [seen.forward(token) for token in needle.question][-1:]
    chunks = planted_chunks(needle, run.pager.geometry.chunk_tokens)
    held = len(chunks & set(seen.resident)) / len(chunks)
    while len(written) < len(needle.answer):
        written.append(seen.forward(written[-1]))
    asked = len(needle.question)
    answer = NeedleResult(
        found=written == list(needle.answer),
        question=fmean(seen.shares[:asked]),
        answer=fmean(seen.shares[asked - 1 :]),  # the question's last token computes the first of the answer
        held=held,
        page_ins=run.pager.stats.page_ins - before,
    )
    return answer, seen.reference


def planted_chunks(needle: Needle, chunk_tokens: int) -> set[int]:
    """Chunks that hold the planted key or its value; the line's end after them is left out."""
    first = round(needle.depth * len(needle.context))
    last = first + len(needle.question) + len(needle.answer) - 1
    return set(range(first // chunk_tokens, last // chunk_tokens + 1))

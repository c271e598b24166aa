"""Running what `judging` judges: the arms take turns on one prompt, then the controls."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from kvlab.core.counts import counted
from kvlab.core.errors import SnapshotRefused, UserError
from kvlab.core.records import versions
from kvlab.kvstore.hf.equality import same_as_cold
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.paging import residency
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot import read
from kvlab_pipeline.studies.restore.arms import (
    ARMS,
    CONSUME,
    CONTROLS,
    DAMAGED,
    FOREIGN,
    LEAST_REPEATS,
    OFF,
    VERIFY,
    Control,
    RestoreVariant,
    RestoreVerdict,
    VariantRun,
)
from kvlab_pipeline.studies.restore.decision import judge

EVERY = 64  # tokens between two selections of a policy that scores
MODES = {OFF: "recompute", CONSUME: "consume", VERIFY: "verify"}


class Attempt(Protocol):
    """Something that answers one prompt, with a snapshot or without."""

    def __call__(self, mode: str, snapshot: Path | None) -> VariantRun:
        """One run in a mode of `restore.MODES`; the snapshot is None where there is to be none."""

    def setting(self) -> Mapping[str, str]:
        """What it runs with just now; asked for after every run."""

    def reach(self, snapshot: read.Snapshot, shared: int) -> int:
        """Of so many shared tokens, how many it has to take from the snapshot; fewer where its pool is small."""


@dataclass(frozen=True)
class Conducted:
    """All that was run, and what it proves; `expected_prefix` tokens had to come from the snapshot."""

    arms: Mapping[str, RestoreVariant]
    controls: Mapping[str, Control]
    verdict: RestoreVerdict
    expected_prefix: int


def conduct(
    attempt: Attempt, snapshot: Path, foreign: Path, prompt: Sequence[int], repeats: int = LEAST_REPEATS
) -> Conducted:
    """Run every arm `repeats` times in turn, then the controls, and judge them.

    Parameters
    ----------
    attempt : Attempt
        Answers the prompt.
    snapshot : Path
        Of a context that shares whole chunks with the prompt. As many as it shares are expected to be restored, as
        far as one token is left to compute, and as the attempt's pool reaches.
    foreign : Path
        Of a context that shares none.
    prompt : sequence of int
        The prompt's ids.
    repeats : int
        Of each arm, from `LEAST_REPEATS`.

    Raises
    ------
    UserError
        The snapshot shares no chunk with the prompt, or none that could be restored, or the foreign one shares some.
    SnapshotRefused, StorageError
        A snapshot cannot be opened.
    """
    counted("repeats", repeats, least=LEAST_REPEATS)
    expected = _expected(attempt, snapshot, prompt)
    with read.open(foreign) as opened:
        shared = opened.usable_prefix(prompt)
    if shared:
        raise UserError(
            f"{foreign} shares tokens with the prompt, so it is no control; give one of another prompt",
            code="user.no-control",
        )
    trials: dict[str, list[VariantRun]] = {name: [] for name in ARMS}
    for turn in range(repeats):
        for name in ARMS[turn % len(ARMS) :] + ARMS[: turn % len(ARMS)]:  # another begins each time
            trials[name].append(_tried(attempt, MODES[name], None if name == OFF else snapshot))
    arms = {name: RestoreVariant(tuple(found)) for name, found in trials.items()}
    controls = _controls(attempt, snapshot, foreign)
    return Conducted(arms, controls, judge(arms, controls, expected), expected)


def _expected(attempt: Attempt, snapshot: Path, prompt: Sequence[int]) -> int:
    """Tokens that have to come from the snapshot, at least one chunk, and never the whole prompt."""
    with read.open(snapshot) as opened:
        size, shared = opened.geometry.chunk_tokens, opened.usable_prefix(prompt)
        if not shared:
            raise UserError(
                f"{snapshot} shares no chunk with the prompt, so nothing could be restored from it",
                code="user.no-shared-chunk",
            )
        found = attempt.reach(opened, min(shared, (len(prompt) - 1) // size * size))
    if not found:
        raise UserError(
            f"{snapshot} shares {shared} tokens with the prompt, but none that leave one to compute and fit the pool as"
            " a cold run would have it; give a longer prompt or a larger pool",
            code="user.nothing-to-compute",
        )
    return found


def _tried(attempt: Attempt, mode: str, snapshot: Path | None) -> VariantRun:
    """One run and what it ran with; a refused snapshot is a finding of the trial, not its end."""
    try:
        trial = attempt(mode, snapshot)
    except SnapshotRefused as error:
        trial = VariantRun(tokens=None, consumed=False, prefix_len=0, codes=error.codes)
    return replace(trial, setting=dict(attempt.setting()))


def _controls(attempt: Attempt, snapshot: Path, foreign: Path) -> dict[str, Control]:
    with tempfile.TemporaryDirectory() as folder:
        given = {DAMAGED: flipped(snapshot, Path(folder) / snapshot.name), FOREIGN: foreign}
        return {name: Control(expected, _tried(attempt, "auto", given[name])) for name, expected in CONTROLS.items()}


def flipped(snapshot: Path, out: Path) -> Path:
    """A copy of a snapshot with one bit of its first chunk's payload flipped, and nothing else."""
    with read.open(snapshot) as opened:
        at = opened.header.payload_at + opened.records[0].nbytes // 2
    data = bytearray(snapshot.read_bytes())
    data[at] ^= 1
    out.write_bytes(data)
    return out


@dataclass(frozen=True)
class PagedAttempt:
    """Answers a prompt with a transformers model over a pager, through `restore.restore`.

    Parameters
    ----------
    model : PagedModel
    prompt : tuple of int
    config : PagerConfig
    policy : str
        A name of `residency.MAKERS`.
    decode : int
        Tokens of the answer.

    Raises
    ------
    ParamsError
        When an answer has no token.
    """

    model: PagedModel
    prompt: tuple[int, ...]
    config: PagerConfig
    policy: str = "lru"
    decode: int = 16

    def __post_init__(self) -> None:
        counted("decode", self.decode, least=1)

    def __call__(self, mode: str, snapshot: Path | None) -> VariantRun:
        """See `Attempt`."""
        how = {"mode": mode, "every": EVERY, "decode": self.decode}
        done = restore(self.model, self.prompt, snapshot, self.config, self.policy, **how)
        report, said = done.report, done.report.comparison
        return VariantRun(
            tokens=tuple(done.run.decode(self.decode).tokens),
            consumed=report.consumed,
            prefix_len=report.prefix_len,
            prefill_ms=report.prefill_ms,
            load_ms=report.load_ms,
            agrees=said.tokens_equal if said else None,
            codes=tuple(reason.code for reason in report.reasons),
        )

    def setting(self) -> Mapping[str, str]:
        """See `Attempt`."""
        info = self.model.info
        pool = {name: str(value) for name, value in asdict(self.config).items()}
        own = {"model_hash": info.model_hash, "dtype": self.model.dtype}
        return versions() | self.model.made | pool | own | {"policy": self.policy, "decode": str(self.decode)}

    def reach(self, snapshot: read.Snapshot, shared: int) -> int:
        """See `Attempt`; said by `sameness.same_as_cold`."""
        policy = residency.build(self.policy, snapshot.geometry)
        return same_as_cold(snapshot.manifest, shared, self.config, policy, EVERY, salt="")

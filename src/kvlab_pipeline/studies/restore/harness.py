"""Whether restoring from a snapshot can be told from never having saved one: arms, repeats, controls, one verdict.

Three arms answer the same prompt: ``off`` recomputes all of it, ``consume`` takes the snapshot's part from the file,
``verify`` does both and compares. `conduct` runs them in turn, then the controls; `judge` is a pure function of what
they did. It says ``pass`` only where every arm gives the same tokens every time and all arms give the same ones, the
consuming arm really restored as much as it should, the arm without was really cold, the controls were refused for the
reason they were made for, and nothing is missing; ``fail`` where one of these was found broken; ``inconclusive`` where
one could not be found out. What was not measured is None, never zero.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from kvlab.core.counts import counted
from kvlab.core.errors import SnapshotRefused, UserError
from kvlab.core.records import versions
from kvlab.kvstore.hf.equality import same_as_cold
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.paging import residency
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.reasons import Code

OFF, CONSUME, VERIFY = "off", "consume", "verify"
ARMS = (OFF, CONSUME, VERIFY)
MODES = {OFF: "recompute", CONSUME: "consume", VERIFY: "verify"}
LEAST_REPEATS = 3
EVERY = 64  # tokens between two selections of a policy that scores

DAMAGED, FOREIGN = "damaged", "foreign"
CONTROLS = {DAMAGED: Code.CHUNK_CHECKSUM, FOREIGN: Code.PREFIX}
"""Snapshots that must not be used, each with the code for which it has to be refused: one with one flipped bit, and one
of another prompt. A verdict needs a run of each that was free to recompute."""


@dataclass(frozen=True)
class VariantRun:
    """What one run of one arm, or of a control, did; None where it was not found out.

    Parameters
    ----------
    tokens : tuple of int or None
        Ids that were generated, greedily.
    consumed : bool or None
        Whether a snapshot was used.
    prefix_len : int or None
        Tokens that came from it.
    prefill_ms, load_ms : float or None
        Milliseconds of computing the rest of the prompt, and of reading the snapshot.
    agrees : bool or None
        Of the verifying arm: whether its warm run gave the tokens of its cold one.
    codes : tuple of str
        Why no snapshot was used.
    setting : mapping of str to str
        What it ran with, read when it had run: hash of the model, versions, threads, pool, policy. Equal for all
        trials, or they are not trials of one experiment.
    """

    tokens: tuple[int, ...] | None
    consumed: bool | None
    prefix_len: int | None
    prefill_ms: float | None = None
    load_ms: float | None = None
    agrees: bool | None = None
    codes: tuple[str, ...] = ()
    setting: Mapping[str, str] = field(default_factory=dict)


class Doubt(StrEnum):
    """What keeps a run from passing."""

    # broken, whatever else is true
    NOT_RESTORED = "not_restored"
    PREFIX_SHORT = "prefix_short"
    NOT_REPEATABLE = "not_repeatable"
    TOKENS_DIFFER = "tokens_differ"
    VERIFY_DISAGREES = "verify_disagrees"
    CONTROL_RESTORED = "control_restored"
    CONTROL_TOKENS = "control_tokens"
    # not found out
    NO_SUCH_ARM = "no_such_arm"
    FEW_REPEATS = "few_repeats"
    SETTINGS_DIFFER = "settings_differ"
    OFF_NOT_REPEATABLE = "off_not_repeatable"
    OFF_NOT_COLD = "off_not_cold"
    MISSING = "missing"
    IMPOSSIBLE = "impossible"
    CONTROL_MISSING = "control_missing"
    CONTROL_OTHER_REASON = "control_other_reason"


BROKEN = frozenset(list(Doubt)[: list(Doubt).index(Doubt.NO_SUCH_ARM)])
Trials = Sequence[VariantRun]  # of one arm, in the order in which they ran


class Objection(NamedTuple):
    """One thing that keeps a run from passing, in one line."""

    code: Doubt
    message: str


@dataclass(frozen=True)
class RestoreVerdict:
    """What may be said of restoring.

    Parameters
    ----------
    outcome : {"pass", "fail", "inconclusive"}
    reasons : tuple of Objection
        Everything that keeps it from passing; empty when it passes.
    speedup : float or None
        Median prefill time of the arm without over that of the consuming arm, load time apart. None unless the
        outcome is ``pass``: what is not known to be the same answer is not a faster one.
    """

    outcome: Literal["pass", "fail", "inconclusive"]
    reasons: tuple[Objection, ...]
    speedup: float | None


# The verdict


def judge(arms: Mapping[str, Trials], controls: Mapping[str, VariantRun], expected_prefix: int) -> RestoreVerdict:
    """The verdict on arms that answered one prompt.

    Parameters
    ----------
    arms : mapping of str to sequence of VariantRun
        By the names of `ARMS`.
    controls : mapping of str to VariantRun
        By the names of `CONTROLS`.
    expected_prefix : int
        Tokens that the consuming arms have to take from the snapshot, from 1.

    Raises
    ------
    ParamsError
        When nothing is expected: arms that restore nothing prove nothing.
    """
    counted("expected_prefix", expected_prefix, least=1)
    present = {name: arms[name] for name in ARMS if name in arms}
    cold = present.get(OFF, ())
    answers = set(_tokens(cold))
    golden = answers.pop() if len(answers) == 1 else None  # the one answer of the arm without a snapshot
    found = [*_incomplete(present), *_settings(present, controls), *_off(cold)]
    for name, trials in present.items():
        if name != OFF:
            found += [*_warm(name, trials, expected_prefix), *_against(golden, name, trials)]
    for name in CONTROLS:
        found += _control(name, controls.get(name), golden)
    if not found:
        medians = [statistics.median(trial.prefill_ms for trial in present[name]) for name in (OFF, CONSUME)]
        return RestoreVerdict("pass", (), medians[0] / medians[1])
    outcome = "fail" if any(finding.code in BROKEN for finding in found) else "inconclusive"
    return RestoreVerdict(outcome, tuple(found), None)


def _incomplete(arms: Mapping[str, Trials]) -> Iterator[Objection]:
    """Arms that are not there, or ran too seldom."""
    for name in ARMS:
        if name not in arms:
            yield Objection(Doubt.NO_SUCH_ARM, f"the arm {name!r} did not run")
        elif (count := len(arms[name])) < LEAST_REPEATS:
            yield Objection(Doubt.FEW_REPEATS, f"the arm {name!r} ran {count} times; {LEAST_REPEATS} are needed")


def _settings(arms: Mapping[str, Trials], controls: Mapping[str, VariantRun]) -> Iterator[Objection]:
    """Whether all trials ran the same thing: those of one arm among themselves, of all arms, and the controls."""
    trials = [*(trial for found in arms.values() for trial in found), *controls.values()]
    keys = sorted({key for trial in trials for key in trial.setting})
    if other := [key for key in keys if len({trial.setting.get(key) for trial in trials}) > 1]:
        yield Objection(Doubt.SETTINGS_DIFFER, f"the trials ran with different {', '.join(other)}")


def _off(trials: Trials) -> Iterator[Objection]:
    """Whether the arm without a snapshot is something to compare with."""
    yield from _missing(OFF, trials, ("tokens", "consumed", "prefix_len", "prefill_ms"))
    if len(set(_tokens(trials))) > 1:
        line = "the arm without a snapshot does not give the same tokens every time, so nothing can be compared with it"
        yield Objection(Doubt.OFF_NOT_REPEATABLE, line)
    if warm := [trial for trial in trials if trial.consumed or trial.prefix_len]:
        yield Objection(Doubt.OFF_NOT_COLD, f"the arm without a snapshot used one, in {len(warm)} trials")


def _warm(name: str, trials: Trials, expected: int) -> Iterator[Objection]:
    """What an arm with a snapshot leaves open, whether it repeats itself, and whether it did what it is there for."""
    timed = ("prefill_ms", "load_ms") if name == CONSUME else ("agrees",)
    yield from _missing(name, trials, ("tokens", "consumed", "prefix_len", *timed))
    if len(set(_tokens(trials))) > 1:
        yield Objection(Doubt.NOT_REPEATABLE, f"the arm {name!r} does not give the same tokens every time")
    if idle := [trial for trial in trials if trial.consumed is False]:
        why = ", ".join(dict.fromkeys(code for trial in idle for code in trial.codes)) or "no reason given"
        yield Objection(Doubt.NOT_RESTORED, f"the arm {name!r} restored nothing in {len(idle)} trials: {why}")
    used = [trial.prefix_len for trial in trials if trial.consumed and trial.prefix_len is not None]
    if short := [length for length in used if length < expected]:
        line = f"the arm {name!r} took {min(short)} tokens from the snapshot where {expected} were due"
        yield Objection(Doubt.PREFIX_SHORT, line)
    if name == VERIFY and any(trial.agrees is False for trial in trials):
        yield Objection(Doubt.VERIFY_DISAGREES, "a run that did both found its warm half to differ from its cold one")


def _missing(name: str, trials: Trials, needed: Sequence[str]) -> Iterator[Objection]:
    """Numbers that are not there, and times that no clock gives."""
    for what in needed:
        values = [getattr(trial, what) for trial in trials]
        if absent := values.count(None):
            yield Objection(Doubt.MISSING, f"{what} of the arm {name!r} is missing in {absent} trials")
        if not what.endswith("_ms"):
            continue
        if wrong := [time for time in values if time is not None and not (math.isfinite(time) and time > 0)]:
            yield Objection(Doubt.IMPOSSIBLE, f"{what} of the arm {name!r} is {wrong[0]}, which is no measured time")


def _against(golden: tuple[int, ...] | None, name: str, trials: Trials) -> Iterator[Objection]:
    """Whether an arm gives what the one without a snapshot gives, where that gives one thing."""
    for tokens in dict.fromkeys(_tokens(trials)):
        if golden is not None and tokens != golden:
            line = f"the arm {name!r} gives other tokens, from number {_parting(tokens, golden)} on"
            yield Objection(Doubt.TOKENS_DIFFER, line)


def _control(name: str, run: VariantRun | None, golden: tuple[int, ...] | None) -> Iterator[Objection]:
    """Whether a snapshot that must not be used was not, for the reason that it was made for."""
    if run is None or run.consumed is None or run.tokens is None:
        yield Objection(Doubt.CONTROL_MISSING, f"the control {name!r} did not run, or did not say what it did")
        return
    if run.consumed or run.prefix_len:
        yield Objection(Doubt.CONTROL_RESTORED, f"the control {name!r} was restored from, which has to be refused")
    elif CONTROLS[name] not in run.codes:
        said = ", ".join(run.codes) or "no reason"
        line = f"the control {name!r} was refused for {said}, not for {CONTROLS[name]}: it was not put to the test"
        yield Objection(Doubt.CONTROL_OTHER_REASON, line)
    if golden is not None and run.tokens != golden:
        line = f"after refusing the control {name!r} other tokens came, from number {_parting(run.tokens, golden)} on"
        yield Objection(Doubt.CONTROL_TOKENS, line)


def _tokens(trials: Trials) -> list[tuple[int, ...]]:
    return [trial.tokens for trial in trials if trial.tokens is not None]


def _parting(tokens: Sequence[int], golden: Sequence[int]) -> int:
    """Where two different answers part, counted from 0."""
    pairs = zip(tokens, golden, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(golden)))


# The runs


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

    arms: Mapping[str, Trials]
    controls: Mapping[str, VariantRun]
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
    arms: dict[str, list[VariantRun]] = {name: [] for name in ARMS}
    for turn in range(repeats):
        for name in ARMS[turn % len(ARMS) :] + ARMS[: turn % len(ARMS)]:  # another begins each time
            arms[name].append(_tried(attempt, MODES[name], None if name == OFF else snapshot))
    with tempfile.TemporaryDirectory() as folder:
        given = {DAMAGED: flipped(snapshot, Path(folder) / snapshot.name), FOREIGN: foreign}
        controls = {name: _tried(attempt, "auto", given[name]) for name in CONTROLS}
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
        pool = {name: str(value) for name, value in asdict(self.config).items()}
        own = {"model_hash": self.model.info.model_hash, "dtype": self.model.dtype}
        return versions() | self.model.made | pool | own | {"policy": self.policy, "decode": str(self.decode)}

    def reach(self, snapshot: read.Snapshot, shared: int) -> int:
        """See `Attempt`; said by `equality.same_as_cold`."""
        policy = residency.build(self.policy, snapshot.geometry)
        return same_as_cold(snapshot.manifest, shared, self.config, policy, EVERY, salt="")

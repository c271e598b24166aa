"""Whether restoring from a snapshot can be told from never having saved one: arms, repeats, controls, one verdict.

Three arms answer the same prompt: ``off`` recomputes all of it, ``consume`` takes the snapshot's part from the file,
``verify`` does both and compares. `judge` is a pure function of what they did. It says ``pass`` only where every arm
gives the same tokens every time and all arms give the same ones, the consuming arm really restored as much as it
should, the arm without was really cold, the controls were refused for the reason they were made for, and nothing is
missing; ``fail`` where one of these was found broken; ``inconclusive`` where one could not be found out. What was not
measured is None, never zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from kvlab.core.counts import counted
from kvlab_pipeline.studies.restore.arms import (
    ARMS,
    BROKEN,
    CONSUME,
    CONTROLS,
    LEAST_REPEATS,
    OFF,
    VERIFY,
    Control,
    Doubt,
    Objection,
    Outcome,
    RestoreVariant,
    RestoreVerdict,
)


def judge(arms: Mapping[str, RestoreVariant], controls: Mapping[str, Control], expected_prefix: int) -> RestoreVerdict:
    """The verdict on arms that answered one prompt.

    Parameters
    ----------
    arms : mapping of str to Arm
        By the names of `ARMS`.
    controls : mapping of str to Control
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
    warm, off = {name: arm for name, arm in present.items() if name != OFF}, present.get(OFF)
    found = [*_incomplete(present), *_settings(present, controls), *_off(off)]
    for name, arm in warm.items():
        found += [*_warm(name, arm), *_restored(name, arm, expected_prefix), *_against_off(name, arm, off)]
    for name in CONTROLS:
        found += _control(name, controls.get(name), off)
    if not found:
        return RestoreVerdict("pass", (), _median(present[OFF]) / _median(present[CONSUME]))
    outcome = "fail" if any(finding.code in BROKEN for finding in found) else "inconclusive"
    return RestoreVerdict(outcome, tuple(found), None)


def combined(verdicts: Iterable[RestoreVerdict]) -> Outcome:
    """The outcome of several prompts together; of none it is inconclusive."""
    outcomes = {verdict.outcome for verdict in verdicts} or {"inconclusive"}
    return next(outcome for outcome in ("fail", "inconclusive", "pass") if outcome in outcomes)


def _incomplete(arms: Mapping[str, RestoreVariant]) -> Iterable[Objection]:
    """Arms that are not there, or ran too seldom."""
    for name in ARMS:
        if name not in arms:
            yield Objection(Doubt.NO_SUCH_ARM, f"the arm {name!r} did not run")
        elif (count := len(arms[name].trials)) < LEAST_REPEATS:
            yield Objection(Doubt.FEW_REPEATS, f"the arm {name!r} ran {count} times; {LEAST_REPEATS} are needed")


def _settings(arms: Mapping[str, RestoreVariant], controls: Mapping[str, Control]) -> Iterable[Objection]:
    """Whether all trials ran the same thing: those of one arm among themselves, of all arms, and the controls."""
    trials = [trial for arm in arms.values() for trial in arm.trials] + [one.trial for one in controls.values()]
    keys = sorted({key for trial in trials for key in trial.setting})
    if other := [key for key in keys if len({trial.setting.get(key) for trial in trials}) > 1]:
        yield Objection(Doubt.SETTINGS_DIFFER, f"the trials ran with different {', '.join(other)}")


def _off(arm: RestoreVariant | None) -> Iterable[Objection]:
    """Whether the arm without a snapshot is something to compare with."""
    if arm is None:
        return
    yield from _missing(OFF, arm, ("tokens", "consumed", "prefix_len", "prefill_ms"))
    if len(set(_tokens(arm))) > 1:
        line = "the arm without a snapshot does not give the same tokens every time, so nothing can be compared with it"
        yield Objection(Doubt.OFF_NOT_REPEATABLE, line)
    warm = [trial.prefix_len for trial in arm.trials if trial.consumed or trial.prefix_len]
    if warm:
        yield Objection(Doubt.OFF_NOT_COLD, f"the arm without a snapshot used one, in {len(warm)} trials")


def _warm(name: str, arm: RestoreVariant) -> Iterable[Objection]:
    """What an arm with a snapshot leaves open, and whether it repeats itself."""
    timed = ("prefill_ms", "load_ms") if name == CONSUME else ("agrees",)
    yield from _missing(name, arm, ("tokens", "consumed", "prefix_len", *timed))
    if len(set(_tokens(arm))) > 1:
        yield Objection(Doubt.NOT_REPEATABLE, f"the arm {name!r} does not give the same tokens every time")


def _missing(name: str, arm: RestoreVariant, needed: Sequence[str]) -> Iterable[Objection]:
    """Numbers that are not there, and times that no clock gives."""
    for what in needed:
        if absent := sum(getattr(trial, what) is None for trial in arm.trials):
            yield Objection(Doubt.MISSING, f"{what} of the arm {name!r} is missing in {absent} trials")
        if not what.endswith("_ms"):
            continue
        times = [value for trial in arm.trials if (value := getattr(trial, what)) is not None]
        if wrong := [value for value in times if not (math.isfinite(value) and value > 0)]:
            yield Objection(Doubt.IMPOSSIBLE, f"{what} of the arm {name!r} is {wrong[0]}, which is no measured time")


def _restored(name: str, arm: RestoreVariant, expected: int) -> Iterable[Objection]:
    """Whether an arm did what it is there for."""
    trials = arm.trials
    idle = [trial for trial in trials if trial.consumed is False]
    if idle:
        why = ", ".join(dict.fromkeys(code for trial in idle for code in trial.codes)) or "no reason given"
        yield Objection(Doubt.NOT_RESTORED, f"the arm {name!r} restored nothing in {len(idle)} trials: {why}")
    used = [trial.prefix_len for trial in trials if trial.consumed and trial.prefix_len is not None]
    if short := [length for length in used if length < expected]:
        line = f"the arm {name!r} took {min(short)} tokens from the snapshot where {expected} were due"
        yield Objection(Doubt.PREFIX_SHORT, line)
    if name == VERIFY and any(trial.agrees is False for trial in trials):
        yield Objection(Doubt.VERIFY_DISAGREES, "a run that did both found its warm half to differ from its cold one")


def _against_off(name: str, arm: RestoreVariant, off: RestoreVariant | None) -> Iterable[Objection]:
    """Whether an arm gives what the one without a snapshot gives, where that gives one thing."""
    golden = _golden(off)
    for tokens in dict.fromkeys(_tokens(arm)):
        if golden is not None and tokens != golden:
            line = f"the arm {name!r} gives other tokens, from number {_parts(tokens, golden)} on"
            yield Objection(Doubt.TOKENS_DIFFER, line)


def _control(name: str, control: Control | None, off: RestoreVariant | None) -> Iterable[Objection]:
    """Whether a snapshot that must not be used was not, for the reason that it was made for."""
    if control is None or control.trial.consumed is None or control.trial.tokens is None:
        yield Objection(Doubt.CONTROL_MISSING, f"the control {name!r} did not run, or did not say what it did")
        return
    trial = control.trial
    if trial.consumed or trial.prefix_len:
        yield Objection(Doubt.CONTROL_RESTORED, f"the control {name!r} was restored from, which has to be refused")
    elif control.due not in trial.codes:
        said = ", ".join(trial.codes) or "no reason"
        line = f"the control {name!r} was refused for {said}, not for {control.due}: it was not put to the test"
        yield Objection(Doubt.CONTROL_OTHER_REASON, line)
    golden = _golden(off)
    if golden is not None and trial.tokens != golden:
        line = f"after refusing the control {name!r} other tokens came, from number {_parts(trial.tokens, golden)} on"
        yield Objection(Doubt.CONTROL_TOKENS, line)


def _golden(off: RestoreVariant | None) -> tuple[int, ...] | None:
    """The one answer of the arm without a snapshot; None where it has none or several."""
    answers = set(_tokens(off)) if off else set()
    return answers.pop() if len(answers) == 1 else None


def _tokens(arm: RestoreVariant) -> list[tuple[int, ...]]:
    return [trial.tokens for trial in arm.trials if trial.tokens is not None]


def _parts(tokens: Sequence[int], golden: Sequence[int]) -> int:
    """Where two different answers part, counted from 0."""
    pairs = zip(tokens, golden, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(golden)))


def _median(arm: RestoreVariant) -> float:
    return statistics.median(trial.prefill_ms for trial in arm.trials)

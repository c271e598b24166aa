"""What an arm of the restore harness did, and what may be said of all of them: the values that `judging` judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from kvlab.kvstore.snapshot.reasons import Code

OFF, CONSUME, VERIFY = "off", "consume", "verify"
ARMS = (OFF, CONSUME, VERIFY)
LEAST_REPEATS = 3
Outcome = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True)
class VariantRun:
    """What one run of one arm did; None where it was not found out.

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


@dataclass(frozen=True)
class RestoreVariant:
    """All trials of one arm, in the order in which they ran."""

    trials: tuple[VariantRun, ...]


@dataclass(frozen=True)
class Control:
    """A snapshot that must not be used, and what was done with it.

    Parameters
    ----------
    due : str
        Code for which it has to be refused.
    trial : Trial
        A run that was free to recompute.
    """

    due: str
    trial: VariantRun


DAMAGED, FOREIGN = "damaged", "foreign"
CONTROLS = {DAMAGED: Code.CHUNK_CHECKSUM, FOREIGN: Code.PREFIX}
"""The controls that a verdict needs: a snapshot with one flipped bit, and one of another prompt."""


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

    outcome: Outcome
    reasons: tuple[Objection, ...]
    speedup: float | None

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons."""
        return tuple(reason.code for reason in self.reasons)

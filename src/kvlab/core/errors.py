"""Exceptions that carry a stable code and data, and say what was given, what is allowed and how to mend it.

`UserError` and its children are mistakes a person can mend (exit code 2); `Fault` and its children
mean that a number could not be trusted and was therefore not produced (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvlabError(Exception):
    """Root of every error that kvlab raises on purpose.

    Parameters
    ----------
    *args : object
        The message.
    code : str, optional
        What is wrong, as a name that stays when the sentence changes: the code of the class, a dot and a word or more
        with hyphens, such as ``"stream.other-version"``. The class's own code where one name says enough.
    """

    exit_code = 1
    code = "kvlab"

    def __init__(self, *args: object, code: str | None = None):
        super().__init__(*args)
        self.code = code or type(self).code

    @property
    def lines(self) -> tuple[str, ...]:
        """What is wrong, a line for each mistake."""
        return (" ".join(str(self).split()),)


class UserError(KvlabError):
    """The input is wrong; the message is one line that says how to mend it."""

    code = "user"
    exit_code = 2


class Fault(KvlabError):
    """The run is wrong; the number it would have produced is withheld."""

    code = "fault"
    exit_code = 1


class ParamsError(UserError):
    """Parameters are unknown, missing or outside their range.

    Parameters
    ----------
    *mistakes : str
        One line for each.
    """

    code = "params"

    def __init__(self, *mistakes: str, code: str | None = None):
        self.mistakes = mistakes
        super().__init__("\n".join(mistakes), code=code)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each mistake."""
        return self.mistakes


class UnknownName(UserError):
    """A name is not in the list of allowed names.

    Parameters
    ----------
    kind : str
        What the name stands for, such as ``"engine"``.
    given : object
        The name as it was given.
    allowed : iterable of str
        The allowed names.
    """

    code = "unknown-name"

    def __init__(self, kind: str, given: object, allowed: Iterable[str]):
        self.kind, self.given, self.allowed = kind, given, sorted(map(str, allowed))
        hint = suggestion(str(given), self.allowed) or ";"  # first, as names may be many
        super().__init__(f"{kind} {given!r} is not known{hint} allowed: {', '.join(self.allowed)}")


class CorpusError(UserError):
    """The text is missing, too short, or not the text that was promised."""

    code = "corpus"


class ModelError(UserError):
    """The model is missing, unsupported, or not the model that was promised."""

    code = "model"


class CapabilityError(UserError):
    """The engine would accept this and get it silently wrong."""

    code = "capability"


class PluginError(UserError):
    """A codec of another package cannot be used; the message names the package."""

    code = "plugin"


class CalibrationMismatch(UserError):
    """The calibration belongs to another model or another configuration."""

    code = "calibration"


class StorageError(UserError):
    """A file could not be read or written; nothing half-written was left behind."""

    code = "storage"


class StreamError(UserError):
    """A coded stream is damaged, cut short, or of another version, recipe or calibration."""

    code = "stream"


class LayoutMismatch(UserError):
    """K and V are not of the shape, dtype or length that the store was built for."""

    code = "layout"


class PagerError(UserError):
    """The pager cannot do this as things stand; nothing has changed."""

    code = "pager"


class PoolTooSmall(PagerError):
    """The pool cannot hold what is never evicted and one chunk to turn over beside it."""

    code = "pool-too-small"


class PoolExhausted(PagerError):
    """No block is free, and no chunk may go."""

    code = "pool-exhausted"


class PinRefused(PagerError):
    """The pins would leave the pool nothing to turn over; none of them was set."""

    code = "pin"


class SnapshotRefused(UserError):
    """A snapshot is damaged, or not the one that is needed; nothing of it was used.

    Parameters
    ----------
    reasons : iterable of (str, str)
        Code and one line of everything that speaks against it.
    origin : object
        The file.
    """

    code = "snapshot"

    def __init__(self, reasons: Iterable[tuple[str, str]], origin: object = "the snapshot"):
        self.reasons, self.origin = tuple(reasons), origin
        super().__init__(f"{origin} is refused: " + "; ".join(f"{line} [{code}]" for code, line in self.reasons))

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes alone."""
        return tuple(code for code, _ in self.reasons)


class NonFinite(Fault):
    """NaN or infinity where a number was expected: as a rule the input's, weights or captures, hence exit code 2."""

    code = "non-finite"
    exit_code = 2


class CodecNotActive(Fault):
    """A codec that was asked for did not fire, or fired without effect."""

    code = "not-active"


class MixedIdentity(Fault):
    """Rows that differ outside the compared factor were about to be compared.

    Parameters
    ----------
    fields : dict of str to iterable
        The differing fields and the values found in each.
    """

    code = "mixed-identity"

    def __init__(self, fields: dict[str, Iterable]):
        self.fields = {name: sorted(map(str, values)) for name, values in fields.items()}
        shown = "; ".join(f"{name}: {' | '.join(values)}" for name, values in self.fields.items())
        super().__init__(f"these rows may not be compared, they differ in {shown}")


class StaleResult(Fault):
    """A result on disk is not one that these parameters plan, or it is there twice."""

    code = "stale"


class RunGone(Fault):
    """The run that started this job is over; its result is no longer wanted and was not written."""

    code = "run-gone"


class MissingResult(UserError):
    """A result that these parameters plan has not been measured."""

    code = "missing-result"


class WitnessDisagrees(Fault):
    """A second computation of what was measured, by other code, comes to something else."""

    code = "witness"


class EnginesDisagree(Fault):
    """The engines differ in fp32 by more than rounding; no cross-engine number is printed."""

    code = "engines-disagree"


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that looks most like `given`, or None when none is close."""
    matches = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return matches[0] if matches else None


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """The end of a message that names the nearest allowed name; empty when none is close."""
    near = nearest(given, allowed)
    return f"; did you mean {near!r}?" if near else ""

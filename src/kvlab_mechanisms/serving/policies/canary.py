"""Which variant of the cache serves: a canary takes a share of the keys, and is promoted only by this project's gate.

A variant is promoted when the gate's claim of it is that it passes and earns ``supported`` (`kvlab.gate.check`), it
served enough, its errors are no more than those of what is active (one-sided Fisher's exact test, and no higher rate
beyond a margin), and its slowest requests are within the bound. Wald's sequential test (1945, Annals of Mathematical
Statistics 16:117) ends a canary early that fails too often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from scipy.stats import fisher_exact

from kvlab.core.errors import UnknownName, UserError
from kvlab.gate.check import Claim
from kvlab_mechanisms.serving.policies.gateway import h64
from kvlab_mechanisms.serving.policies.profiler import Histogram

State = Literal["registered", "canary", "active", "retired"]
TRANSITIONS: dict[State, tuple[State, ...]] = {
    "registered": ("canary", "active"),
    "canary": ("active", "registered"),
    "active": ("retired",),
    "retired": ("active", "canary"),
}
SUPPORTED = "supported"


class CanaryRefused(UserError):
    """A variant may not do this; the message says what is missing."""

    code = "canary"


@dataclass
class Version:
    """A variant, what the gate says of it, and how it served.

    Parameters
    ----------
    name : str
    claim : Claim or None
        Of its row; None where the gate has not judged it.
    """

    name: str
    claim: Claim | None
    state: State = "registered"
    served: int = 0
    errors: int = 0
    latency: Histogram = field(default_factory=Histogram)
    llr: float = 0.0


@dataclass(frozen=True)
class Terms:
    """Of a promotion.

    Parameters
    ----------
    requests : int
        That a canary has to have served.
    alpha : float
        Of Fisher's test, and the chance that the sequential test ends a good canary.
    margin : float
        By which its rate of errors may be above the active one's.
    slowest : float
        Seconds that its 99th percentile may have.
    good, bad : float
        Rates of errors between which the sequential test tells.
    """

    requests: int = 50
    alpha: float = 0.05
    margin: float = 0.01
    slowest: float = math.inf
    good: float = 0.01
    bad: float = 0.1


class Canary:
    """The register of variants, and who serves.

    Parameters
    ----------
    fraction : float
        Of the keys that a canary takes. The split is by a hash of the key, so a key stays where it is while the
        fraction does, and a larger fraction moves keys to the canary alone.
    terms : Terms
    salt : str
        Of the hash; another one takes other keys.
    """

    def __init__(self, fraction: float = 0.1, terms: Terms | None = None, salt: str = ""):
        self.terms, self.salt = terms or Terms(), salt
        self.versions: dict[str, Version] = {}
        self.history: list[str] = []
        self.fraction = fraction
        if not 0 <= fraction <= 1:
            raise UserError(f"fraction {fraction:g}; allowed: from 0 to 1")

    def register(self, name: str, claim: Claim | None) -> Version:
        """Make a variant known."""
        if name in self.versions:
            raise UserError(f"version {name!r} is registered already; allowed: a new name")
        self.versions[name] = Version(name, claim)
        return self.versions[name]

    def _in(self, state: State) -> Version | None:
        return next((one for one in self.versions.values() if one.state == state), None)

    @property
    def active(self) -> Version | None:
        """The variant that serves, if any."""
        return self._in("active")

    @property
    def canary(self) -> Version | None:
        """The variant that is tried, if any."""
        return self._in("canary")

    def _known(self, name: str) -> Version:
        if name not in self.versions:
            raise UnknownName("version", name, self.versions)
        return self.versions[name]

    def _move(self, one: Version, state: State) -> None:
        if state not in TRANSITIONS[one.state]:
            allowed = ", ".join(TRANSITIONS[one.state])
            raise CanaryRefused(
                f"version {one.name!r} is {one.state} and cannot become {state}; allowed: {allowed}",
                code="canary.transition",
            )
        one.state = state

    def begin(self, name: str) -> None:
        """Have a variant serve the first keys, where nothing serves yet; it has to be what the gate lets through."""
        one = self._known(name)
        if self.active:
            raise CanaryRefused(f"version {self.active.name!r} is active; stage {name!r} instead")
        if missing := evidence_missing(one.claim):
            raise CanaryRefused(f"version {name!r}: {missing}")
        self._move(one, "active")

    def stage(self, name: str) -> None:
        """Try a variant on a share of the keys."""
        one = self._known(name)
        if self.canary or not self.active:
            raise CanaryRefused(f"version {name!r} cannot be staged; allowed: one canary beside an active version")
        self._move(one, "canary")
        one.served = one.errors = 0
        one.latency, one.llr = Histogram(), 0.0

    def route(self, key: object) -> str:
        """Who serves a key."""
        active = canary = None
        for one in self.versions.values():  # there are few; one pass for both
            if one.state == "active":
                active = one
            elif one.state == "canary":
                canary = one
        if active is None:
            raise CanaryRefused("no version is active; begin with one")
        if canary and h64(self.salt, key) < self.fraction * 2**64:
            return canary.name
        return active.name

    def record(self, name: str, ok: bool, seconds: float = 0.0) -> None:
        """How a request went; a canary that fails too often is taken back at once."""
        one = self._known(name)
        one.served += 1
        one.errors += not ok
        one.latency.record(seconds)
        own = self.terms
        one.llr += math.log((1 - own.bad) / (1 - own.good)) if ok else math.log(own.bad / own.good)
        if one.state == "canary" and one.llr > math.log((1 - own.alpha) / own.alpha):
            self._move(one, "registered")

    def missing(self, name: str) -> list[str]:
        """What keeps a canary from being promoted; nothing where it may be."""
        one, own, active = self._known(name), self.terms, self.active
        found = [said] if (said := evidence_missing(one.claim)) else []
        if one.served < own.requests:
            found.append(f"{one.served} requests of {own.requests}")
        if one.served and active:
            table = [[one.errors, one.served - one.errors], [active.errors, active.served - active.errors]]
            rate, before = one.errors / one.served, active.errors / max(active.served, 1)
            if rate > before + own.margin or fisher_exact(table, alternative="greater").pvalue < own.alpha:
                found.append(f"{100 * rate:.3g} % errors, {100 * before:.3g} % before")
        if one.served and (slow := one.latency.percentiles((99.0,))[0]) > own.slowest:
            found.append(f"99th percentile {slow:.3g} s, {own.slowest:g} allowed")
        return found

    def promote(self) -> str:
        """Make the canary the active version, if nothing is missing."""
        one, active = self.canary, self.active
        if one is None or active is None:
            raise CanaryRefused("no canary is staged; allowed: to promote one that is")
        if missing := self.missing(one.name):
            raise CanaryRefused(
                f"version {one.name!r} is not promoted: {'; '.join(missing)}", code="canary.not-promoted"
            )
        self._move(active, "retired")
        self._move(one, "active")
        self.history.append(active.name)
        return one.name

    def rollback(self) -> str:
        """Go back to what was active before; as often as there was something."""
        if self.active is None or not self.history:
            raise CanaryRefused(
                "nothing was active before; allowed: to roll a promotion back", code="canary.nothing-before"
            )
        before = self.versions[self.history[-1]]
        if missing := evidence_missing(before.claim):
            raise CanaryRefused(f"version {before.name!r}: {missing}")
        self.history.pop()
        self._move(self.active, "retired")
        self._move(before, "active")
        return before.name

    def judge(self, name: str, claim: Claim | None) -> None:
        """The gate judged a variant anew."""
        self._known(name).claim = claim


def evidence_missing(claim: Claim | None) -> str | None:
    """What the gate's claim lacks for a variant to serve; None where nothing, or where nothing lossy is in it."""
    if claim is None:
        return "the gate has not judged it; run `kvlab gate check`"
    if claim.word == "not_applicable" and not claim.findings:
        return None
    if claim.word != "pass" or claim.earned != SUPPORTED:
        why = ", ".join(claim.failed_criteria) or f"its evidence earns {claim.earned}"
        return f"the gate says {claim.word}, {why}; {SUPPORTED} is needed"
    return None

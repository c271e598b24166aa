"""Rate limits that cannot mint tokens: the generic cell rate algorithm in whole numbers (ITU-T I.371, annex A).

One number for each tenant, the time at which its bucket will be full again; a token moves it by 1 / rate. Time never
goes back for a tenant, whatever the clock that is shown does, and all is integers, so nothing is made by rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from math import gcd
from threading import Lock
from typing import NamedTuple

from kvlab.core.errors import UserError

NANO = 1_000_000_000


class TokenGrant(NamedTuple):
    """Whether so many tokens are granted; nanoseconds until they would be, None where they never are."""

    allowed: bool
    wait: int | None


class RateLimit:
    """Over any time of d nanoseconds a tenant is granted at most burst + rate x d / 10⁹ tokens.

    Parameters
    ----------
    rate : int
        Tokens per second: requests, prompt tokens, or bytes of KV times seconds.
    burst : int
        Tokens of a full bucket, as it is at first.
    tenants : int
        That are remembered. The one that was idle longest is forgotten, and only if its bucket is full; when none is,
        a new one is refused, for forgetting would fill it.
    """

    def __init__(self, rate: int, burst: int, tenants: int = 100_000):
        for name, value in (("rate", rate), ("burst", burst), ("tenants", tenants)):
            if type(value) is not int or value < 1:
                raise UserError(f"{name} {value!r}; allowed: a whole number of at least 1")
        common = gcd(NANO, rate)
        self.rate, self.burst, self.most = rate, burst, tenants
        self._token, self._tick = NANO // common, rate // common  # a nanosecond is `_tick` units, a token `_token`
        self._burst = burst * self._token
        self._full: OrderedDict[str, tuple[int, int]] = OrderedDict()  # units: full again at, newest time seen
        self._newest = None
        self._lock = Lock()

    def consume(self, tenant: str, tokens: int, now: int) -> TokenGrant:
        """Ask for tokens at a time in nanoseconds; what is denied takes nothing."""
        if type(tokens) is not int or tokens < 0:
            raise UserError(f"{tokens!r} tokens; allowed: a whole number of at least 0")
        now = int(now) * self._tick
        with self._lock:
            newest = self._newest
            if newest is None or now > newest:  # also by who asks for too much
                self._newest = newest = now
            known = self._full.get(tenant)
            if known is not None:
                full, seen = known
                now = now if now > seen else seen
            elif tokens > self.burst:
                return TokenGrant(False, None)
            else:
                now = full = newest  # a tenant that was forgotten must not come back to an earlier time
                if len(self._full) >= self.most and not self._forget(now):
                    return TokenGrant(False, self._wait(next(iter(self._full.values()))[0], now))
            return self._granted(tenant, tokens, full, now)

    def _granted(self, tenant: str, tokens: int, full: int, now: int) -> TokenGrant:
        """Of a tenant whose bucket is full again at a time; both in units."""
        if tokens > self.burst:
            self._full[tenant] = (full, now)
            return TokenGrant(False, None)
        after = (full if full > now else now) + tokens * self._token
        limit = now + self._burst
        allowed = after <= limit
        self._full[tenant] = (after if allowed else full, now)
        self._full.move_to_end(tenant)
        return TokenGrant(allowed, 0 if allowed else self._wait(after, limit))

    def _wait(self, then: int, now: int) -> int:
        """Nanoseconds between, rounded up."""
        return max(0, -(-(then - now) // self._tick))

    def _forget(self, now: int) -> bool:
        tenant, (full, _) = next(iter(self._full.items()))
        if full <= now:
            del self._full[tenant]
            return True
        return False

    def tokens(self, tenant: str, now: int) -> int:
        """Whole tokens that a tenant could be granted."""
        full, seen = self._full.get(tenant, (0, None))
        now = int(now) * self._tick
        now = now if seen is None else max(now, seen)
        return self.burst if seen is None else self.burst - max(0, -(-(full - now) // self._token))

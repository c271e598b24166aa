"""The two tiers of the suite: what `make test` runs, and what `make test-all` adds.

The first tier is what one runs before a commit. In the second are

- the tests marked `full`: they run other programs as a person would (DVC, Snakemake over the whole pipeline or once for
  each parameter, a scheduler's stand-in, an S3 server, a browser, vLLM beyond the engine that a session shares, a
  second process that computes everything again), train a model more than once, or wait for a process to be killed;
- all properties once more, each with as many examples as it asks for; in the first tier each has a fifth of them.
"""

from __future__ import annotations

from hypothesis import settings

FIRST, SECOND = "first", "second"  # also the names of the profiles of hypothesis
SHARE = {FIRST: 20, SECOND: 100}  # per cent of the examples, and the examples of a property that asks for none
COMPILED = "KVLAB_TEST_COMPILED"  # set for tests of compiled loops, which run in a process of their own
LEAST = 5  # examples, in either tier

for name, percent in SHARE.items():
    settings.register_profile(name, max_examples=percent, deadline=None)


def number(wanted: int) -> int:
    """How many examples a property that asks for `wanted` has in the tier that is run."""
    return min(wanted, max(LEAST, wanted * settings.default.max_examples // 100))


def examples(wanted: int) -> settings:
    """So many examples in the second tier, fewer in the first: a decorator."""
    return settings(max_examples=number(wanted), deadline=None)

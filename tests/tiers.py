"""The three tiers of the suite: `make test`, what `make test-rest` adds, and `make test-nightly`.

The first tier is what one runs before a commit. A test is in another one by its mark:

- `full`: it runs other programs as a person would (DVC and Snakemake over the whole pipeline, a browser, a vLLM with
  coded pages), compiles, plants results or corruptions and builds the whole report of each, forges files by the
  hundred, or is of code that FINDINGS.md does not need; or it measures rows of the gate again.
  CI runs these after the first tier.
- `nightly`: it needs long and seldom tells what the first two do not: schedulers, S3, every case of a handover, each
  way to kill a run, most processes of vLLM beside the engine that a session shares, experiments of DVC, faults planted
  in a real run, training, peak memory, the micro-benchmark, loops that are compiled for options which are no default,
  laws of speculation, lm-eval, most of what is run by hand in `validation`.

The third tier also has all properties once more, each with as many examples as it asks for; in the others each has a
fifth of them.
"""

from __future__ import annotations

import re
from collections.abc import Container

from hypothesis import settings

FULL, NIGHTLY = "full", "nightly"  # marks; a test with neither is in the first tier
NEITHER = f"not {FULL} and not {NIGHTLY}"  # how `make test` asks for the first tier
LATER = re.compile(rf"^pytestmark = .*mark\.({FULL}|{NIGHTLY})", re.MULTILINE)  # in a file all of which is in another
FIRST = "first"  # with `NIGHTLY` also the names of the profiles of hypothesis
SHARE = {FIRST: 20, NIGHTLY: 100}  # per cent of the examples, and the examples of a property that asks for none
COMPILED = "KVLAB_TEST_COMPILED"  # set for tests of compiled loops, which run in a process of their own
LEAST = 5  # examples, in any tier

for name, percent in SHARE.items():
    settings.register_profile(name, max_examples=percent, deadline=None)


def tier(marks: Container[str]) -> str:
    """The one tier of a test with these marks.

    Raises
    ------
    ValueError
        If the marks name two tiers.
    """
    named = [mark for mark in (FULL, NIGHTLY) if mark in marks]
    if len(named) > 1:
        raise ValueError(f"marked {' and '.join(named)}: a test is in one tier")
    return named[0] if named else FIRST


def number(wanted: int) -> int:
    """How many examples a property that asks for `wanted` has in the tier that is run."""
    return min(wanted, max(LEAST, wanted * settings.default.max_examples // 100))


def examples(wanted: int) -> settings:
    """So many examples in the third tier, fewer in the others: a decorator."""
    return settings(max_examples=number(wanted), deadline=None)

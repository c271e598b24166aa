"""What `kvlab check` runs once its inputs are checked: one format, in two looks. Imports torch.

The looks are fixed before anything is measured: a third of the windows, of which the interval has a confidence of 99 %,
and all of them, of which it has 96 %. The first settles it where its interval lies on one side of the bound. One of
both misses the true mean in no more than 1 + 4 of 100 runs (Bonferroni 1936), as an interval of 95 % does that is
looked at once. Where somebody said how many windows, all are measured and looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from kvlab.advice.serving import CacheFormat, ServingEngine
from kvlab.advice.verdicts import OPEN, answer
from kvlab.core.errors import CapabilityError
from kvlab.core.model import resolve_folder
from kvlab.measure.quick_run import FirstLook, Scored
from kvlab.trials.advised import Advice
from kvlab.trials.bench import FormatBench, about, facts_of, setting_of, setting_rows, text_windows, unable
from kvlab.trials.evidence import gate_rows

PARTS = 3  # of the windows, the first of which is looked at alone
EARLY, LATE = 0.99, 0.96  # confidence


def checked(args: SimpleNamespace, engine: ServingEngine, format: CacheFormat, texts: Sequence[str]) -> Advice:
    """Measure one format as an engine reads it; parameters and what is raised as of `recommended`.

    `texts` are documents that are joined.
    """
    info = resolve_folder(args.model)
    if why := engine.refused(format, args.device, info.n_layers, info.head_dim):
        raise CapabilityError(f"format {format.name!r} cannot be taken: {why}", code="capability.no-format")
    windows = text_windows(args, info, texts)
    early = len(windows) // PARTS if args.exactly is None and len(windows) == args.windows else len(windows)
    windows = np.concatenate([windows[first::PARTS] for first in range(PARTS)])  # each part is of the whole text
    bench = FormatBench.started(args, info, windows, windows[:0])

    def settled(found: list[Scored]) -> bool:
        floor, coded = found
        return answer(coded.estimates(EARLY)[0], args.loss, floor.estimates()[0].value) != OPEN

    try:
        bench.control([engine.as_read])
        bench.fit(args, [format])
        if why := unable(format, info, bench.fitted):
            raise CapabilityError(f"format {format.name!r} cannot be taken: {why}", code="capability.no-format")
        setting = setting_of(format, bench, tuple(args.exact))
        looks = early < len(windows)
        floor, found = bench.with_floor([setting], engine.as_read, FirstLook(early, settled) if looks else None)
        cost = found[setting]
        told = "looked at once"
        if looks:
            cost = cost.at(EARLY if cost.windows == early else LATE)
            told = f"{early} are looked at first, all only where these leave it open; {cost.windows} were needed"
        facts = facts_of(args, bench) | {"witnessed": bench.testimonies}
        rows = setting_rows(bench, {engine.name: [setting]}, {setting: cost}, floor.kl.value, facts["values"])
        judged = gate_rows(bench, facts, [(engine, setting, cost)])
        return Advice(facts, about(args, bench, told), floor, (), rows, gate_rows=tuple(judged))
    finally:
        bench.engine.close()

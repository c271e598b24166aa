"""Self-speculation: the model drafts over its coded cache, and the exact cache decides what is written."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np

from kvlab.codecs.recipes import named_recipe
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab_mechanisms.decoding.acceptance import acceptance, plain_texts
from kvlab_mechanisms.decoding.law import Sampling
from kvlab_pipeline.studies.table import Interval
from kvlab_pipeline.studies.tradeoffs.bench import Bench
from kvlab_pipeline.studies.tradeoffs.record import Drafted

GREEDY = Sampling(0.0)


def drafted(bench: Bench, bootstrap: Bootstrap) -> Iterator[Drafted]:
    """Every drafter at every width of `combined`, on the contexts of the first windows.

    Raises
    ------
    Fault
        A text is not the greedy one of the exact cache.
    """
    settings, model = bench.params.tradeoffs, bench.engine.model
    prompts = [list(window.ids[: bench.context]) for window in bench.windows[: settings.prompts]]
    began = perf_counter()
    greedy = plain_texts(model, prompts, settings.tokens, GREEDY)
    plain_seconds = perf_counter() - began
    written = settings.tokens * len(prompts)
    for codec in settings.drafters:
        for bits in settings.combined:
            recipe, runs = named_recipe(codec, bits, params=bench.params), []
            for prompt, text in zip(prompts, greedy, strict=True):
                runs.append(
                    acceptance(
                        model, [prompt], recipe, GREEDY, tokens=settings.tokens, draft=settings.draft,
                        calibration=bench.calibrated, greedy=[text],
                    )
                )  # fmt: skip
            shares = np.array([sum(one.report.accepted) / sum(one.report.drafted) for one in runs])
            place = np.arange(len(shares))
            yield Drafted(
                name=f"{codec} {bits}",
                recipe_id=recipe.recipe_id,
                accepted=Interval.of(bootstrap.mean(Column.of(place, place, shares)), 0.0, 1.0),
                tokens_per_call=written / sum(len(one.report.accepted) for one in runs),
                draft=settings.draft,
                coded=float(np.mean([one.bits_per_value for one in runs])) * bench.info.values_per_token / 8,
                exact=2.0 * bench.info.values_per_token,
                per_second=written / sum(one.seconds for one in runs),
                plain_per_second=written / plain_seconds,
            )

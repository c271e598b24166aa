"""The codecs beside one another in the report: which to use at how many bits, and what each costs."""

from __future__ import annotations

from kvlab.core.errors import MissingResult
from kvlab_pipeline.studies.chapter import Chapter, Drawn, Measured, Section, estimates_of
from kvlab_pipeline.studies.ladder.beyond import further_entries
from kvlab_pipeline.studies.ladder.claims import claims
from kvlab_pipeline.studies.ladder.figure import ladder, ladder_table
from kvlab_pipeline.studies.ladder.numbers import ladder_entries, rungs_of
from kvlab_pipeline.studies.ladder.record import read_facts
from kvlab_pipeline.studies.ladder.schema import (
    AblationEntry,
    AnswerEntry,
    FurtherEntry,
    GainEntry,
    RungEntry,
    StateEntry,
)
from kvlab_pipeline.studies.ladder.state import gain_entries, refuse_other, state_entries
from kvlab_pipeline.studies.ladder.tables import context


def entries(measured: Measured) -> dict[str, list[dict]]:
    """Its parts of ``metrics.json``; `MissingResult` where nothing weighed the calibrations."""
    params, boot = measured.params, measured.boot
    if measured.sources.ladder is None:
        raise MissingResult(
            "the ladder's calibrations are not weighed; run `kvlab step ladder`, and name it with --ladder"
        )
    facts, rungs = read_facts(measured.sources.ladder), rungs_of(params, measured.results)
    refuse_other(facts, measured.results)
    return ladder_entries(boot, rungs) | {
        "ladder_further": further_entries(params, measured.sources.further, measured.results, boot),
        "ladder_state": state_entries(params, facts, rungs),
        "ladder_gain": gain_entries(params, facts, boot, measured.results.select("ladder")[0].documents),
    }


CHAPTER = Chapter(
    parts={
        "ladder": tuple[RungEntry, ...],
        "ladder_answers": tuple[AnswerEntry, ...],
        "ladder_ablation": tuple[AblationEntry, ...],
        "ladder_state": tuple[StateEntry, ...],
        "ladder_gain": tuple[GainEntry, ...],
        "ladder_further": tuple[FurtherEntry, ...],
    },
    entries=entries,
    sections={"ladder": Section(5, "Which codec to use at how many bits", asks="codecs beside one another")},
    context=context,
    claims=claims,
    figures={"ladder": Drawn(ladder_table, ladder)},
    limits=lambda metrics: [("codecs beside one another, KL", estimates_of(metrics, "ladder", "difference"))],
)

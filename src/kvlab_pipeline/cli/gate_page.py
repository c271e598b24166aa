"""`kvlab gate report`: GATE.md of what the pipeline measured. Heavy imports happen inside the verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvlab.cli.commands import Verbs
from kvlab.cli.flags import path, result, word
from kvlab.cli.gate import OfContext, OfRows

REPORT = Verbs()


@REPORT.verb
def report_verb(
    rows: OfRows,
    context: OfContext,
    out: Annotated[Path, result("the page; its figure is written beside it")],
    records: Annotated[
        list[Path],
        path(
            "what `kvlab step mechanisms` wrote, of which the rows were made: throughputs get intervals, and the"
            " baseline's second run is told",
            metavar="FILE ...",
        ),
    ] = (),
    disclosures: Annotated[
        list[str], word("what has to be told with every number of a model", metavar="[MODEL=SENTENCE ...]")
    ] = (),
    json: Annotated[Path | None, result("what the page says of each row")] = None,
) -> None:
    """Write GATE.md: what every row earns and why, what is best of it, and how far the gate can be trusted.

    Rows that earn less than they claim are no failure here, the page says so; `kvlab gate check` is what fails.
    Corruptions, false alarms and planted losses are played anew, from seeds: equal rows give equal bytes. The curve
    of planted losses is drawn beside the page, as detection.svg and detection.csv.
    """
    from kvlab_pipeline.gate_page.page import write
    from kvlab_pipeline.gate_page.samples import read

    told = dict(one.partition("=")[::2] for one in disclosures)
    summary = write(rows, context, out, json, read(records), told)
    earned = ", ".join(f"{count} {tier}" for tier, count in summary.counts.items() if count)
    print(f"{out}: {len(summary.rows)} rows, of which {earned or 'none was judged'}")

"""`kvlab gate report`: GATE.md of what the pipeline measured. Heavy imports happen inside the verb."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvlab.cli.flags import Flag, path, result, word
from kvlab.cli.gate import FILES, JUDGED_BY, context_of, rows_of

ABOUT = """\
  report      GATE.md: what every row earns and why, and how far the gate can be trusted
"""


def report_verb(args: argparse.Namespace) -> None:
    """Write GATE.md: what every row earns and why, what is best of it, and how far the gate can be trusted.

    Rows that earn less than they claim are no failure here, the page says so; `kvlab gate check` is what fails.
    Corruptions, false alarms and planted losses are played anew, from seeds: equal rows give equal bytes. The curve
    of planted losses is drawn beside the page, as detection.svg and detection.csv.
    """
    from kvlab_pipeline.gate_page.page import write
    from kvlab_pipeline.gate_page.samples import read

    disclosures = dict(one.partition("=")[::2] for one in args.disclosures)
    summary = write(rows_of(args), context_of(args), args.out, args.json, read(args.records), disclosures)
    earned = ", ".join(f"{count} {tier}" for tier, count in summary.counts.items() if count)
    print(f"{args.out}: {len(summary.rows)} rows, of which {earned or 'none was judged'}")


VERBS: dict[Callable, list[Flag]] = {
    report_verb: [
        FILES,
        *JUDGED_BY,
        path(
            "--records",
            "what `kvlab step mechanisms` wrote, of which the rows were made: throughputs get intervals, and the"
            " baseline's second run is told",
            required=False,
            nargs="+",
            default=[],
        ),
        word(
            "--disclosures",
            "what has to be told with every number of a model",
            metavar="MODEL=SENTENCE",
            nargs="*",
            default=[],
        ),
        result("--out", "the page; its figure is written beside it"),
        result("--json", "what the page says of each row", required=False),
    ],
}

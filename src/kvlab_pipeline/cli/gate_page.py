"""`kvlab gate report` and `replay`, which measure rows again. Heavy imports happen inside the verbs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from kvlab.cli.commands import FromFlags, Verbs
from kvlab.cli.flags import choice, number, path, result, switch, whole, word
from kvlab.cli.gate import OfContext, OfRows, put, tell
from kvlab.cli.given import DEFAULT_PARAMS

REPORT = Verbs()
Items = Annotated[int, number("items of each eval that are measured again, drawn anew each time; default: 1", whole(1))]


def workspace_of(replay: Sequence[str], items: int = 1):
    """What measures rows again here, by parameters as files or JSON; None where none are named."""
    from kvlab.core.paramfile import read_yaml
    from kvlab_pipeline.replay import Workspace
    from kvlab_pipeline.studies.settings import by_model, read_params

    found = {}
    for text in replay:
        named = [read_params(text)] if text.startswith("{") else by_model(read_yaml(Path(text))).values()
        found |= {params.model.slug: params for params in named}
    return Workspace(found, items) if found else None


def _named(
    replay: Annotated[
        list[str],
        word(
            "parameters of the run in this folder, which made the rows: those that would be certified are measured"
            " again; without it none is certified",
            metavar="[FILE|JSON ...]",
        ),
    ] = (),
    items: Items = 1,
):
    return workspace_of(replay, items)


def _here(
    params: Annotated[str, word(f"default: {DEFAULT_PARAMS}", metavar="FILE|JSON")] = DEFAULT_PARAMS, items: Items = 1
):
    return workspace_of([params], items)


@REPORT.verb
def report_verb(
    rows: OfRows,
    context: OfContext,
    out: Annotated[Path, result("the page; its reasons are written beside it")],
    replayer: Annotated[Any, FromFlags(_named)],
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
    """Write GATE.md: what every row earns and why, and what is best of it.

    Rows that earn less than they claim are no failure here, the page says so; `kvlab gate check` is what fails.
    Equal rows give equal bytes, but for which items were measured again and when. How far the gate itself can be
    trusted is written by `kvlab step gate_trust`.
    """
    from kvlab_pipeline.gate_page.page import write
    from kvlab_pipeline.gate_page.samples import read

    told = dict(one.partition("=")[::2] for one in disclosures)
    summary = write(rows, context, out, json, read(records), told, replayer)
    earned = ", ".join(f"{count} {tier}" for tier, count in summary.counts.items() if count)
    print(f"{out}: {len(summary.rows)} rows, of which {earned or 'none was judged'}")


@REPORT.verb
def replay_verb(
    rows: OfRows,
    context: OfContext,
    replayer: Annotated[Any, FromFlags(_here)],
    format: Annotated[str, choice("default: markdown", ("markdown", "json", "junit"))] = "markdown",
    out: Annotated[Path | None, result("what is written instead of printed; a summary is printed")] = None,
    store: Annotated[Path | None, word("store that the rows are put into, an SQLite file", metavar="DB")] = None,
    replace: Annotated[
        bool, switch("replace rows that are there with other content, or judged otherwise", "--replace")
    ] = False,
) -> int:
    """Judge rows as `kvlab gate check` does, and measure again what would be certified.

    Run it in the workspace that made the rows: its records, texts, calibrations and weights are read. Each row and its
    evidence are made anew of the record and have to be equal; then items that are drawn are measured again, of the row
    and of the engine as it is, and have to come out as the record says. Only such a row is certified, here and in the
    store. Exit codes are those of `kvlab gate check`.
    """
    from kvlab.gate.check import check

    report = check(rows, context, replayer=replayer)
    for claim in report.claims:
        if claim.replay or claim.uncertified:
            said = "certified" if claim.certified else claim.uncertified or "measured again it is not the same"
            print(f"{claim.row['row_id']}: {said}", file=sys.stderr)
    if store:
        print(put(store, rows, report, replace=replace), file=sys.stderr)
    return tell(report, format, out)

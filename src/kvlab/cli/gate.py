"""What each verb of `kvlab gate` does, and its flags. Heavy imports happen inside the verbs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from kvlab.cli.commands import FromFlags, Verbs
from kvlab.cli.flags import choice, number, path, place, result, switch, whole, word
from kvlab.core.errors import UserError
from kvlab.output.terminal import FORMATS, as_json, as_text, printable

GATE = Verbs(
    """\
Which numbers may be published: check, query and more.

Rows are held against their evidence, the registries and one another (docs/gate.md).""",
    ends="""
Exit codes: 0 done, or the gate passes; 1 the gate fails; 2 the input is wrong, or nothing could be judged.""",
)
Files = Annotated[list[Path], place("rows as JSON: a list of objects or one, of this project's or the published style")]
Evidence = Annotated[list[Path], path("evidence that is not written into its row", metavar="FILE ...")]
Current = Annotated[
    list[Path], path("JSON by model: model_hash, corpus_hash and code of now; others are stale", metavar="FILE ...")
]
Mechanisms = Annotated[Path | None, path("registry of mechanisms; default: the shipped one")]
Evals = Annotated[Path | None, path("registry of evals; default: the shipped one")]
Store = Annotated[Path, place("the store, an SQLite file", metavar="DB")]
Where = Annotated[
    list[str],
    word(
        "rows of this value; a column given twice may have either, and nothing after = asks for rows that do not say",
        metavar="COLUMN=VALUE ...",
    ),
]
Format = Annotated[str, choice(f"default: {FORMATS[0]}", FORMATS)]
OfTerminal = Annotated[str, choice("default: table", ("table", "json"))]


def rows_of(files: Files, evidence: Evidence = ()) -> list:
    """The rows of all files, with the evidence that was given beside them."""
    from kvlab.gate import evidence as pieces
    from kvlab.gate.catalogue.rows import read_rows
    from kvlab.gate.inputs import attached

    rows = [row for file in files for row in read_rows(file)]
    return attached(rows, {str(file): pieces.read(file) for file in evidence})


def context_of(current: Current = (), mechanisms: Mechanisms = None, evals: Evals = None):
    """What rows are judged against, as of today."""
    import datetime

    from kvlab.gate import registry
    from kvlab.gate.inputs import read_current
    from kvlab.gate.rules import Context

    now = read_current(*current) if current else None
    return Context(registry.load(mechanisms, evals), now, (), datetime.date.today())


def _columns() -> list[Parameter]:
    """The columns of a mechanism as flags."""
    from kvlab.gate.catalogue import flags

    return flags(("mechanism",))


OfRows = Annotated[list, FromFlags(rows_of)]
OfContext = Annotated[Any, FromFlags(context_of)]


FIRST = ("run", "row_id", "support_status", "earned_tier", "derived_status")


# ------------------------------------------------------------------------------------- judging


@GATE.verb
def check_verb(
    rows: OfRows,
    context: OfContext,
    strict: Annotated[bool, switch("waived rows and rows without a mechanism fail too", "--strict")] = False,
    waivers: Annotated[Path | None, path("YAML list of waivers")] = None,
    format: Annotated[str, choice("default: markdown", ("markdown", "json", "junit"))] = "markdown",
    out: Annotated[Path | None, result("what is written instead of printed; a summary is printed")] = None,
) -> int:
    """Judge rows: what each earns of the tier that it claims, with every reason.

    Exit code 0 when every row that declares a mechanism earns what it claims, or is waived; 1 when one does not; 2 when
    the input is wrong, or no row declares a mechanism: nothing checked is not nothing wrong.

    Evidence in files belongs to the rows of the same model, engine, recipe_id, context_tokens, dtype, protocol, device
    and calibration; evidence of no row is refused.
    """
    from kvlab.gate.check import check
    from kvlab.gate.rules import WAIVABLE
    from kvlab.gate.waivers import read

    return tell(check(rows, replace(context, waivers=read(waivers, WAIVABLE) if waivers else ()), strict), format, out)


def tell(report, format: str, out: Path | None) -> int:
    """Print a report, or write it to a file and print its summary; the exit code that it asks for."""
    from kvlab.core.records import atomic
    from kvlab.gate import render

    text = getattr(render, f"to_{format}")(report)
    if out:
        with atomic(out) as temporary:
            temporary.write_bytes(text.encode())  # UTF-8, whatever the locale
        text = "".join(f"{line}\n" for line in (*_summary(report), f"see {out}"))
    _say(text)
    if report.verdict == "cannot_judge":
        print(f"kvlab gate check: none of {len(report.claims)} rows declares a mechanism to judge", file=sys.stderr)
    return report.exit_code


def _say(text: str) -> None:
    """Print; a reader that leaves early does not turn a failure into a success."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _summary(report) -> Iterable[str]:
    """The verdict in a line, and one for each thing that keeps a row from its claim."""
    counts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in report.counts.items())
    yield f"{report.verdict.replace('_', ' ')}: {len(report.claims)} rows, of which {counts}"
    for claim in report.claims:
        for finding in claim.findings:
            if finding.counts and (report.strict or not finding.waiver):
                yield from (printable(f"{claim.row['row_id']}: {reason}") for reason in finding.reasons)


@GATE.verb
def config_verb(file: Annotated[Path, place("YAML mapping of fields")]) -> None:
    """Check what a configuration and the environment declare, and print it as the fields of a row.

    The file is a YAML mapping; its keys are the flags of `kvlab gate ingest`, or the names of the row's fields. Fields
    that it does not name may come from the environment: the published ones by their names in capitals, as
    MECHANISM_VARIANT, others with KVLAB_ROW_ before them, as KVLAB_ROW_MODEL; an empty variable says nothing.

    The configuration comes first, and nothing is overridden: where both name a field they must say the same, or both
    are refused with the names of the two places. An explicit null says that there is none, which a variable with a
    value contradicts. Whether names are registered is asked by `kvlab gate check`.
    """
    from kvlab.gate.catalogue import environment, read_config
    from kvlab.gate.inputs import declared

    print(as_json(declared(read_config(file), environment(os.environ), file)))


@GATE.verb
def import_verb(
    plain: Annotated[Path, path("folder or results file of lm_eval, of the model as it is")],
    coded: Annotated[Path, path("the same of the run with the compressed cache")],
    task: Annotated[str, word("id of a registered eval of lm-evaluation-harness (`kvlab gate registry`)")],
    mechanism: Annotated[
        str,
        word("what the second run did to its cache, as registered: kv_quantization/fp8_e4m3", metavar="NAME/VARIANT"),
    ],
    context_tokens: Annotated[
        int,
        number(
            "most tokens of an item with its answer, which lm_eval does not write down; the length of RULER's texts",
            whole(1),
        ),
    ],
    out: Annotated[Path, result("folder of evidence.json and row.json", metavar="DIR")],
    differs: Annotated[
        list[str],
        word(
            "arguments of the model (`--model_args`) that the second run was given otherwise, as kv_cache_dtype; none"
            " where the environment does it",
            metavar="ARGUMENT ...",
        ),
    ] = (),
    claim: Annotated[str, word("tier that the row claims; default: gated")] = "gated",
    mechanisms: Mechanisms = None,
    evals: Evals = None,
) -> None:
    """Make evidence of two runs of lm-evaluation-harness that you made: plain, and with a compressed cache.

    Both with `--output_path DIR --log_samples`, on any of its engines, with the same tasks, items, prompts and
    arguments but for those that --differs names. Items are paired one by one. What the harness does not write, the
    bytes of the cache and whether a codec ran, is not made up: the evidence says that nobody looked, and may show that
    too much is lost, never that little is, so its row earns `reviewed_preview` at most (docs/gate.md). The folder --out
    gets evidence.json and row.json, for `kvlab gate check`.
    """
    from kvlab.cli.evals import refuse_unlisted_claim
    from kvlab.core.records import write_json
    from kvlab.evals.imported import imported
    from kvlab.gate import registry

    refuse_unlisted_claim(claim)
    known = registry.load(mechanisms, evals)
    made = imported(known, task, mechanism, plain, coded, differs, context_tokens, claim)
    write_json(out / "row.json", made.row)
    write_json(out / "evidence.json", made.evidence.model_dump(mode="json"))
    for key, found in made.measures.items():
        change = found.paired
        print(
            f"{task}: {key} of {found.variant.n} items is {found.variant.value:.4g}, without"
            f" {found.baseline.value:.4g}; paired {change.value:+.4g} [{change.low:+.4g}, {change.high:+.4g}]"
        )
    print(f"{made.evidence.imported.changed} answers differ; nobody saw the cache, so this can show a loss alone")
    print(f"next: kvlab gate check {out}/row.json --evidence {out}/evidence.json")


# -------------------------------------------------------------------------------------- the store


@GATE.verb
def ingest_verb(
    db: Store,
    rows: OfRows,
    columns: Annotated[dict, FromFlags(dict, _columns)],
    context: OfContext,
    kept_under: Annotated[
        str | None, word("the run that the rows are kept under; default: what each names", "--run", metavar="NAME")
    ] = None,
    replace: Annotated[
        bool, switch("replace rows that are there with other content, or judged otherwise", "--replace")
    ] = False,
    strict: Annotated[
        bool, switch("keep nothing unless every row earns what it claims (exit code 1)", "--strict")
    ] = False,
) -> int:
    """Put rows into a store, with what the gate says of them: all rows of all files, or none.

    A flag fills a field that a row leaves empty, as rows of the published style do. One that says something else than
    the row is refused. A row that is there already with the same content is left alone; with other content, or judged
    against another registry or another --current, it is refused unless it is to be replaced.
    """
    from kvlab.gate.catalogue import from_flags
    from kvlab.gate.check import check
    from kvlab.gate.inputs import filled

    rows = [filled(row, from_flags(columns)) for row in rows]
    report = check(rows, context, strict)
    if strict and report.exit_code:
        print("\n".join([*_summary(report), f"nothing was put into {db}"]), file=sys.stderr)
        return report.exit_code
    print(put(db, rows, report, kept_under, replace))
    return 0


def put(db: Path, rows: list, report, run: str | None = None, replace: bool = False) -> str:
    """Put rows and what a report says of them into a store, and say what that did."""
    from kvlab.gate.store import open_store
    from kvlab.gate.store.ingest import ingest, prepared

    batch = prepared(rows, report, run)  # before the store, which is not made for what is refused
    with open_store(db, create=True) as store:
        done = ingest(store, batch, replace)
    rejudged = f", {done.rejudged} of them judged anew" if done.rejudged else ""
    return f"{db}: {done.added} rows added, {done.replaced} replaced, {done.same} there already{rejudged}"


@GATE.verb
def query_verb(
    db: Store,
    where: Where = (),
    group_by: Annotated[list[str], word("columns to group by", metavar="COLUMN ...")] = (),
    best: Annotated[str | None, word("the one row of each group where this measure is best", metavar="COLUMN")] = None,
    certified: Annotated[
        bool,
        switch(
            "only rows that earn `supported` and came out the same when `kvlab gate replay` put them here",
            "--certified",
        ),
    ] = False,
    format: Format = FORMATS[0],
) -> None:
    """Rows of a store, or groups of rows, or the best row of each group.

    Every answer says which tier its rows have earned, and by which registry: groups are divided by both, so that no
    average mixes what is certified with what is not, or not any more. A database of an older schema is upgraded in
    place, by additions only.
    """
    from kvlab.gate.store import open_store
    from kvlab.gate.store.queries import query

    with open_store(db) as store:
        _show(query(store, _where(where), group_by, best, certified), format)


@GATE.verb
def export_verb(
    db: Store, out: Annotated[Path, place("parquet file, replaced when the rows are there")], where: Where = ()
) -> None:
    """Write rows of a store as parquet, with every column."""
    from kvlab.gate.store import open_store
    from kvlab.gate.store.queries import export

    with open_store(db) as store:
        found = export(store, out, _where(where))
    print(f"{out}: {len(found)} rows")


@GATE.verb
def diff_verb(
    db: Store,
    run_a: Annotated[str, word("before", argument=True, metavar="RUN_A")],
    run_b: Annotated[str, word("after", argument=True, metavar="RUN_B")],
    format: Format = FORMATS[0],
) -> None:
    """What changed from one run of a store to another: rows added and gone, and every value that is another.

    What the gate says of a row is compared like its values. Exit code 0, whether anything changed or not.
    """
    from kvlab.gate.store import open_store
    from kvlab.gate.store.queries import diff

    with open_store(db) as store:
        _show(diff(store, run_a, run_b), format)


def _where(given: Iterable[str]) -> dict[str, list[str | None]]:
    """Columns and the values asked for; nothing after the sign asks for rows that do not say."""
    wanted: dict[str, list[str | None]] = {}
    for text in given:
        column, sign, value = text.partition("=")
        if not (column and sign):
            raise UserError(f"--where {text!r} is no COLUMN=VALUE")
        wanted.setdefault(column, []).append(value or None)
    return wanted


def _show(frame, form: str) -> None:
    columns = frame.columns
    if form == "table" and "row_id" in columns:  # of many columns, what a person looks for stands where it is seen
        columns = sorted(columns, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    print(as_text(frame.rows(named=True), columns, form))


# ------------------------------------------------------------------------------- what there is


@GATE.verb
def registry_verb(mechanisms: Mechanisms = None, evals: Evals = None, format: OfTerminal = "table") -> None:
    """The mechanisms and evals that there are, shipped or in files of your own, checked as a whole."""
    from kvlab.gate import registry

    known = registry.load(mechanisms, evals)
    described = known.describe()
    if format == "json":
        print(as_json({"digest": known.digest} | described))
        return
    print(f"registry {known.digest}")
    for name, rows in described.items():
        print(f"\n{name}\n{as_text(rows, list(rows[0]) if rows else [], format)}")


@GATE.verb
def reasons_verb(format: OfTerminal = "table") -> None:
    """Everything that can be wrong with rows, configurations, registries and evidence, by its code."""
    from kvlab.gate.reasons import CONFIG_REASONS, EVIDENCE_REASONS, REGISTRY_REASONS, ROW_REASONS

    kinds = {"row": ROW_REASONS, "config": CONFIG_REASONS, "registry": REGISTRY_REASONS, "evidence": EVIDENCE_REASONS}
    rows = [
        {"about": kind, "code": code, "meaning": text}
        for kind, listed in kinds.items()
        for code, text in listed.items()
    ]
    print(as_text(rows, ("about", "code", "meaning"), format))


SCHEMAS = ("row", "config", "evidence", "report")


@GATE.verb
def schema_verb(what: Annotated[str, choice("of what", SCHEMAS, argument=True)]) -> None:
    """JSON schema of a row's fields, of a configuration, of evidence, or of a report of `kvlab gate check`."""
    from kvlab.gate.catalogue import SCHEMA, config_schema, row_schema
    from kvlab.gate.check import GateReport
    from kvlab.gate.evidence import Evidence

    match what:
        case "row":
            found = row_schema()
        case "config":
            found = config_schema()
        case "evidence":
            found = {"$schema": SCHEMA} | Evidence.model_json_schema()
        case _:
            found = {"$schema": SCHEMA} | GateReport.model_json_schema(mode="serialization")
    print(as_json(found))

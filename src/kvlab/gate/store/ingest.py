"""Rows into the store and back: each once, all of an ingest or nothing, and with them what the gate claims of them.

A row has its place by run and `row_id`. The same content again changes nothing; other content in the same place is
refused unless it is to replace what is there, and then takes its claim and its evidence with it. Another claim of the
same content is refused likewise: a tier is not changed by whoever holds another registry and ingests once more.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from datetime import UTC, datetime

from kvlab.core.errors import NonFinite, UnknownName, UserError
from kvlab.core.recipe import canonical, digest
from kvlab.gate.catalogue import BY_NAME, TIERS, Row, checked_row, sql_columns
from kvlab.gate.catalogue.values import RowError, checked, shown
from kvlab.gate.check import Claim, GateReport
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.reasons import Reason
from kvlab.gate.store.database import RowStore
from kvlab.gate.store.migrations import PUBLISHED_TABLE, quoted

# What the store keeps of a claim of the gate: what it was judged against, the tier, the status, the reasons, and how
# near the loss is to too much.


@dataclass(frozen=True)
class ClaimRecord:
    """A claim as a line of the store; the fields are the columns, in order.

    Parameters
    ----------
    registry_digest : str
        Of the registry that the row was judged against.
    current_digest : str or None
        Of what was said to be current; None where nothing said it.
    earned_tier, derived_status : str or None
        As the gate said; None where it did not judge.
    loss_metric : str or None
        The metric that is nearest to its margin, or farthest beyond; None when no loss was judged.
    loss : float or None
        Its loss against the baseline, worse is positive, in the metric's unit.
    loss_share : float or None
        The upper end of that loss over the margin; within is at most 1.
    reasons : str
        JSON: every reason, in order.
    certified : int
        1 where the row earns the best tier and came out the same when it was measured again in that call, 0 elsewhere.
    replay : str or None
        JSON: what measuring again found (`kvlab.gate.replay.Replay`). Each time other items are drawn, so that two
        claims that differ in nothing else are equal.
    """

    registry_digest: str
    current_digest: str | None
    earned_tier: str | None
    derived_status: str | None
    loss_metric: str | None
    loss: float | None
    loss_share: float | None
    reasons: str
    certified: int = 0
    replay: str | None = field(default=None, compare=False)


def recorded(claim: Claim, report: GateReport) -> ClaimRecord:
    """What the store keeps of a claim of a report.

    Raises
    ------
    UnknownName
        The earned tier is none.
    NonFinite
        A judged loss is NaN or infinite.
    """
    if claim.earned is not None and claim.earned not in TIERS:
        raise UnknownName("earned tier", claim.earned, TIERS)
    reasons = json.dumps([str(reason) for finding in claim.findings for reason in finding.reasons])
    said = report.registry, report.current, claim.earned, claim.status
    again = int(claim.certified), claim.replay and claim.replay.model_dump_json()
    judged = [judgement for judgement in claim.judgements if judgement.margin and judgement.high is not None]
    if not judged:
        return ClaimRecord(*said, None, None, None, reasons, *again)
    worst = max(judged, key=_share)
    if not (math.isfinite(_share(worst)) and math.isfinite(worst.loss)):
        raise NonFinite(
            f"the loss of {worst.key} of row {claim.row['row_id']!r} is {worst.loss}, up to {worst.high}",
            code="non-finite.loss",
        )
    return ClaimRecord(*said, worst.key, worst.loss, _share(worst), reasons, *again)


def _share(judgement: Judgement) -> float:
    """Of the margin; what is not finite counts as most, so that it is found."""
    share = judgement.high / judgement.margin
    return share if math.isfinite(share) and math.isfinite(judgement.loss) else math.inf


Place = tuple[str, str]  # run and row_id
Disagreement = tuple[Place, ClaimRecord, ClaimRecord]  # what the store holds of a place, and what is said of it now
CLAIM_COLUMNS = ", ".join(quoted(one.name) for one in fields(ClaimRecord))


@dataclass(frozen=True)
class Ingested:
    """What an ingest did.

    Parameters
    ----------
    added, replaced, same : int
        Rows that were new, that took the place of others, and that were there already.
    rejudged : int
        Of the last, those of which the gate now claims something that it did not.
    """

    added: int
    replaced: int
    same: int
    rejudged: int


@dataclass(frozen=True)
class StoredRow:
    """One row as the store holds it: its values by column, its evidence and its embedded record as JSON.

    `own_run` is the run that the row names itself; `named_run` is that too, where it is kept under another.
    """

    values: dict
    evidence: tuple[str, ...]
    embedded: str | None
    own_run: str | None
    named_run: str | None
    digest: str
    source: str

    @property
    def place(self) -> Place:
        """Run and `row_id`."""
        return self.values["run"], self.values["row_id"]


@dataclass(frozen=True)
class Batch:
    """Rows and what the gate claims of them, as they go into a store together."""

    entries: Mapping[Place, StoredRow]
    claims: Mapping[Place, ClaimRecord]


def prepared(rows: Sequence[Row], report: GateReport, run: str | None = None) -> Batch:
    """Rows and claims as a store takes them, with everything refused that can be without looking into one.

    Parameters
    ----------
    rows : sequence of Row
        Those that were judged: a claim is only taken together with its row.
    report : Report
        The gate's, on these rows; it may say nothing of some.
    run : str or None
        The run that they are kept under; None for the one that each row names. A row that names another run
        remembers it.

    Raises
    ------
    UserError
        A row has no run, holds what the catalogue does not allow, or is there twice and differs; a claim is of no row
        of these, or is no claim.
    """
    entries = _by_place([_entry(row, run) for row in rows])
    return Batch(entries, _claims(report, entries))


def ingest(store: RowStore, batch: Batch, replace: bool = False) -> Ingested:
    """Put rows into an open store, and what the gate claims of them, in one transaction.

    Parameters
    ----------
    store : RowStore
    batch : Batch
    replace : bool
        Whether other content under the same run and `row_id`, or another claim, is replaced.

    Raises
    ------
    UserError
        A row is there with other content, or with a claim that was judged against something else or says something
        else.
    StoreLocked, StorageError
        The store cannot be written. In every case nothing was changed.
    """
    with store.transaction() as connection:
        known = _known_digests(connection, {run for run, _ in batch.entries})
        new = [entry for place, entry in batch.entries.items() if place not in known]
        other = [entry for place, entry in batch.entries.items() if known.get(place, entry.digest) != entry.digest]
        disagreeing = _disagreements(connection, batch.claims)
        if other and not replace:
            raise UserError(_refusal(other), code="user.other-content")
        if disagreeing and not replace:
            raise UserError(_refusal_of_claims(disagreeing), code="user.other-judgement")
        _remove(connection, other)
        _add(connection, [*new, *other])
        written = _put_claims(connection, batch.claims)
    fresh = {entry.place for entry in (*new, *other)}
    return Ingested(len(new), len(other), len(batch.entries) - len(fresh), len(written - fresh))


# ------------------------------------------------------------------------------ before the write


def _entry(row: Row, run: str | None) -> StoredRow:
    values = checked_row(row.values)
    kept = _run_name(run if run is not None else values["run"], row.source)
    named = values["run"] if values["run"] != kept else None
    evidence = tuple(_json(item, f"evidence of {row.source or values['row_id']}") for item in row.evidence)
    embedded = None if row.embedded is None else _json(row.embedded, f"embedded record of {row.source}")
    # what a row does not say is no part of it: a column that the catalogue gains later changes no digest
    said = {name: value for name, value in values.items() if value is not None and name != "run"}
    content = digest({"values": said, "run": named, "evidence": evidence, "embedded": embedded})
    return StoredRow(values | {"run": kept}, evidence, embedded, values["run"], named, content, row.source)


def _run_name(run: object, source: str) -> str:
    name = checked(BY_NAME["run"], run)
    if isinstance(name, Reason):
        raise RowError([name], source)
    if name is None:
        raise UserError(f"{source or 'a row'} names no run; give one with --run", code="user.no-run")
    if name == PUBLISHED_TABLE:
        raise UserError(
            f"the run {name!r} is that of the published study's table; choose another name", code="user.published-run"
        )
    return name


def _json(value: object, what: str) -> str:
    try:
        return canonical(value)
    except (ValueError, TypeError) as error:
        raise NonFinite(f"{what} is no JSON: {error}", code="non-finite.json") from None


def _by_place(entries: list[StoredRow]) -> dict[Place, StoredRow]:
    """One entry for each place; the same row twice counts once."""
    found: dict[Place, StoredRow] = {}
    for entry in entries:
        first = found.setdefault(entry.place, entry)
        if first.digest != entry.digest:
            raise UserError(
                f"{entry.source or 'a row'} and {first.source or 'another'} are both row {entry.place[1]!r} of run "
                f"{entry.place[0]!r} and differ; give each a row_id of its own, or one only",
                code="user.row-twice",
            )
    return found


def _refusal(other: list[StoredRow]) -> str:
    run, row_id = other[0].place
    more = f", and {len(other) - 1} more" if len(other) > 1 else ""
    return (
        f"row {row_id!r} of run {run!r} is in the store with other content{more}; "
        "nothing was changed, choose another run or replace them with --replace"
    )


def _refusal_of_claims(found: list[Disagreement]) -> str:
    (run, row_id), before, now = found[0]
    differing = [
        f"{one.name} is {shown(getattr(before, one.name))} there and {shown(getattr(now, one.name))} here"
        for one in fields(ClaimRecord)
        if one.compare and getattr(before, one.name) != getattr(now, one.name)
    ]
    more = f"; so are {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"row {row_id!r} of run {run!r} is in the store as it was judged otherwise: {', '.join(differing[:3])}{more}; "
        "nothing was changed, choose another run or replace what the gate said with --replace"
    )


def _claims(report: GateReport, entries: Mapping[Place, StoredRow]) -> dict[Place, ClaimRecord]:
    """The claims by the place of their rows, which the gate knew by the run that each row names itself."""
    places = {(entry.own_run, entry.place[1]): entry.place for entry in entries.values()}
    found: dict[Place, ClaimRecord] = {}
    for claim in report.claims:
        name = claim.row["run"], claim.row["row_id"]
        if name not in places:
            raise UserError(
                f"a claim is of row {name[1]!r} of run {name[0]!r}, which is not among these rows",
                code="user.claim-of-no-row",
            )
        record = recorded(claim, report)
        if found.setdefault(places[name], record) != record:
            raise UserError(
                f"two claims of row {name[1]!r} of run {name[0]!r} differ; give one", code="user.claim-twice"
            )
    return found


# ------------------------------------------------------------------------- inside the transaction


def _known_digests(connection: sqlite3.Connection, runs: set[str]) -> dict[Place, str]:
    return {
        (run, row_id): known
        for run in runs
        for row_id, known in connection.execute("SELECT row_id, digest FROM rows WHERE run = ?", (run,))
    }


def _remove(connection: sqlite3.Connection, entries: list[StoredRow]) -> None:
    """Rows, with their evidence and claims (the tables' foreign keys cascade)."""
    connection.executemany("DELETE FROM rows WHERE run = ? AND row_id = ?", [entry.place for entry in entries])


def _add(connection: sqlite3.Connection, entries: list[StoredRow]) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    runs = sorted({entry.place[0] for entry in entries})
    connection.executemany(
        "INSERT INTO runs (run, ingested_at) VALUES (?, ?) ON CONFLICT DO NOTHING", ((run, now) for run in runs)
    )
    names = [name for name, _ in sql_columns()]
    columns = ", ".join(map(quoted, [*names, "named_run", "embedded", "digest"]))
    marks = ", ".join("?" * (len(names) + 3))
    connection.executemany(
        f"INSERT INTO rows ({columns}) VALUES ({marks})",
        (
            [entry.values.get(name) for name in names] + [entry.named_run, entry.embedded, entry.digest]
            for entry in entries
        ),
    )
    connection.executemany(
        "INSERT INTO evidence (run, row_id, place, content) VALUES (?, ?, ?, ?)",
        ((*entry.place, number, text) for entry in entries for number, text in enumerate(entry.evidence)),
    )


def _disagreements(connection: sqlite3.Connection, claims: Mapping[Place, ClaimRecord]) -> list[Disagreement]:
    """Places whose claim in the store is another, with that one and the new one."""
    found = ((place, _known_claim(connection, place), claim) for place, claim in claims.items())
    return [(place, known, claim) for place, known, claim in found if known not in (None, claim)]


def _known_claim(connection: sqlite3.Connection, place: Place) -> ClaimRecord | None:
    statement = f"SELECT {CLAIM_COLUMNS} FROM claims WHERE run = ? AND row_id = ?"
    found = connection.execute(statement, place).fetchone()
    return found and ClaimRecord(*found)


def _put_claims(connection: sqlite3.Connection, claims: Mapping[Place, ClaimRecord]) -> set[Place]:
    """Write the claims that say something new; the places of those."""
    changed = {place: claim for place, claim in claims.items() if _known_claim(connection, place) != claim}
    marks = ", ".join("?" * (len(fields(ClaimRecord)) + 2))
    connection.executemany(
        f"INSERT OR REPLACE INTO claims (run, row_id, {CLAIM_COLUMNS}) VALUES ({marks})",
        ((*place, *astuple(claim)) for place, claim in changed.items()),
    )
    return set(changed)


# -------------------------------------------------------------------------------------- back out


def stored_rows(store: RowStore, run: str) -> list[Row]:
    """A run's rows as they were ingested, by `row_id`, for the gate to judge again; none when there is no such run.

    The store does not tell a mechanism that was null from one that was absent: both come back absent, which declares
    nothing.
    """
    names = [name for name, _ in sql_columns()]
    wanted = ", ".join(f"r.{quoted(name)}" for name in names)
    attached = (
        "SELECT json_group_array(json_array(place, content)) FROM evidence WHERE run = r.run AND row_id = r.row_id"
    )
    found = store.select(
        f"SELECT r.named_run, r.embedded, ({attached}), {wanted} FROM rows r WHERE r.run = ? ORDER BY r.row_id", (run,)
    )
    return [_row(dict(zip(names, values, strict=True)), *kept) for *kept, values in ((*f[:3], f[3:]) for f in found)]


def _row(values: dict, named_run: str | None, embedded: str | None, attached: str) -> Row:
    source = f"run {values['run']} row {values['row_id']}"
    own = dict(values)
    if named_run is not None:
        own["run"] = named_run
    if own["mechanism"] is None:
        del own["mechanism"]
    evidence = tuple(json.loads(text) for _, text in sorted(json.loads(attached)))
    return Row(own, evidence, None if embedded is None else json.loads(embedded), source)

"""Questions to the store: its rows are read into one table, and asked there; every answer says which tier is earned.

The published study's table is read in place as one more run: its rows carry no claim, so they are never certified. That
table kept whatever it was given, so a value that is not of its column's kind is not said, nor is a measurement of a run
that did not succeed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import get_args, get_type_hints

import polars as pl

from kvlab.core.errors import CapabilityError, StorageError, UnknownName
from kvlab.core.records import write_table
from kvlab.gate.catalogue import BY_NAME, COLUMNS, PUBLISHED_NAMES, STATUSES, TIERS, RowColumn, groupable
from kvlab.gate.catalogue.values import RowError, Value, checked, parsed
from kvlab.gate.reasons import Reason
from kvlab.gate.store.database import RowStore
from kvlab.gate.store.ingest import ClaimRecord
from kvlab.gate.store.migrations import PUBLISHED_TABLE, columns, quoted

CERTIFIED = TIERS[0]
POLARS = {str: pl.String(), float: pl.Float64(), int: pl.Int64()}
QUALITY = {name: POLARS[(get_args(kind) or (kind,))[0]] for name, kind in get_type_hints(ClaimRecord).items()}
"""What the gate claims of a row, and the type of each; all null where it was never asked."""

SCHEMA = {column.name: POLARS[column.kind] for column in COLUMNS} | QUALITY
"""Every column that a row of a query has, and its type."""

QUALITY_WORDS = {"earned_tier": TIERS, "derived_status": STATUSES}

OWN_FILES = ("", "-wal", "-shm", "-journal")
"""Endings of the store's own files: the database and what SQLite keeps beside it while it is open."""

QUALITY_KEYS = ("earned_tier", "certified", "derived_status", "quality_eval_id", "registry_digest")
"""Part of every grouping: an average never mixes what is certified with what is not, nor what one registry allows with
what another does."""

BEST = dict.fromkeys(("kv_bytes", "bits_per_value", "kl", "delta_nll", "compression_ratio"), "least")
BEST |= {"top1_agreement": "most"}
"""What can be best, and which way. Nothing that is not judged is among it."""

UNCOMPARED = ("run", "replay")
"""Columns in which two runs always differ: their name, and which items were drawn to be measured again, and when."""

UNJUDGED = tuple(column.name for column in COLUMNS if not column.judged)
"""Times, memory and rates of speculation, which no evidence vouches for."""

SUMMARIES = {
    "mean_bits_per_value": ("mean", "bits_per_value"),
    "max_loss_share": ("max", "loss_share"),
}
"""What is said of a group; each leaves out the rows that do not say it."""


def query(
    store: RowStore,
    where: Mapping[str, object] | None = None,
    group_by: Sequence[str] = (),
    best: str | None = None,
    certified_only: bool = False,
) -> pl.DataFrame:
    """Rows, groups of rows, or the best row of each group.

    Parameters
    ----------
    store : RowStore
        Open.
    where : mapping
        Column to value, to a list of values, or to None for rows that do not say; a text is read as the column's kind.
    group_by : sequence of str
        Columns that `groupable` names.
    best : str or None
        A measure: of each group (of everything, without `group_by`) the one row where it is best, whole. Rows without
        it take no part; of equals the first by run and `row_id`.
    certified_only : bool
        Whether only rows are looked at that have earned the tier ``supported`` and came out the same when the gate
        measured them again, in the call that put them here. What is not judged (`RowColumn.judged`)
        is left out of them: it is not certified with the rest.

    Returns
    -------
    polars.DataFrame
        Without `group_by` or with `best`: rows, with every column of `SCHEMA`, of certified ones every judged one. With
        `group_by` alone: a line for each group *and* each of `QUALITY_KEYS` in it, ``rows`` (how many) and `SUMMARIES`.

    Raises
    ------
    UnknownName
        A name that is none, or cannot be asked for so.
    CapabilityError
        A measure is to be best of which no evidence says what it is.
    RowError
        A value that its column cannot hold.
    """
    names = _groups(group_by)
    wanted = _condition(where or {}, certified_only)
    if best in UNJUDGED:
        raise CapabilityError(
            f"{best} is not judged: no evidence says what it is, so nothing is chosen by it;"
            f" allowed: {', '.join(BEST)}",
            code="capability.unjudged",
        )
    if best not in (None, *BEST):
        raise UnknownName("measure that can be best", best, BEST)
    found = everything(store).filter(wanted)
    if names and best is None:
        keys = list(dict.fromkeys([*names, *QUALITY_KEYS]))
        summed = (getattr(pl.col(name), function)().alias(summary) for summary, (function, name) in SUMMARIES.items())
        return found.group_by(keys).agg(pl.len().cast(pl.Int64).alias("rows"), *summed).sort(keys)
    if best is not None:
        found = found.drop_nulls(best).sort(best, descending=BEST[best] == "most", maintain_order=True)
        found = found.unique(names, keep="first", maintain_order=True) if names else found.head(1)
        found = found.sort([*names, "run", "row_id"])
    certified = certified_only or (where or {}).get("earned_tier") == CERTIFIED
    return found.drop(UNJUDGED) if certified else found


def export(store: RowStore, path: Path | str, where: Mapping[str, object] | None = None) -> pl.DataFrame:
    """Write all rows, or those that `where` names, as parquet; what was written.

    Raises
    ------
    StorageError
        The file cannot be written, or is the store itself or one that SQLite keeps beside it.
    """
    own = store.path.resolve()
    if Path(path).resolve() in [own.with_name(own.name + ending) for ending in OWN_FILES]:
        raise StorageError(
            f"{path} is the store itself, or a part of it; choose another file to export to", code="storage.own-file"
        )
    table = query(store, where)
    write_table(path, table)
    return table


def diff(store: RowStore, run_a: str, run_b: str) -> pl.DataFrame:
    """What changed from one run to another.

    Parameters
    ----------
    store : RowStore
        Open.
    run_a, run_b : str
        Before and after.

    Returns
    -------
    polars.DataFrame
        ``row_id``, ``model``, ``mechanism``, ``mechanism_variant``, ``change`` (``added``, ``gone``, or ``changed``:
        then a line for each such column), ``column``, ``before`` and ``after`` (as JSON; null where the row does not
        say). What the gate claims of a row is compared like its values. Empty when the runs are equal.

    Raises
    ------
    UnknownName
        The store has no such run.
    """
    for run in (run_a, run_b):
        if run not in runs(store):
            raise UnknownName("run", run, runs(store))
    table = query(store, {"run": [run_a, run_b]})
    old, new = ({row["row_id"]: row for row in table.rows(named=True) if row["run"] == run} for run in (run_a, run_b))
    lines = chain.from_iterable(_changes(old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys()))
    shown = ("row_id", "model", "mechanism", "mechanism_variant", "change", "column", "before", "after")
    return pl.DataFrame(list(lines), schema=dict.fromkeys(shown, pl.String()), orient="row")


def runs(store: RowStore) -> list[str]:
    """Names of the runs in the store; the published study's table is one."""
    found = [name for (name,) in store.select("SELECT run FROM runs ORDER BY run")]
    return [*found, PUBLISHED_TABLE] if columns(store.connection, PUBLISHED_TABLE) else found


# ---------------------------------------------------------------------------------- all the rows


def everything(store: RowStore) -> pl.DataFrame:
    """Every row of the store with what the gate claims of it, in the order of run and `row_id`; columns as `SCHEMA`."""
    wanted = [*(f"r.{quoted(name)}" for name in BY_NAME), *(f"c.{quoted(name)}" for name in QUALITY)]
    own = store.select(f"SELECT {', '.join(wanted)} FROM rows r LEFT JOIN claims c USING (run, row_id)")
    return pl.DataFrame([*own, *_published(store)], schema=SCHEMA, orient="row").sort("run", "row_id")


def _published(store: RowStore) -> Iterable[tuple]:
    """The published study's rows, under this catalogue's columns as far as it has them."""
    present = columns(store.connection, PUBLISHED_TABLE)
    if not present:
        return
    read = [_spelling(column, present) for column in COLUMNS]
    key, status = "id" if "id" in present else "rowid", "status" if "status" in present else "'success'"
    for number, success, *values in store.select(f"SELECT {key}, {status}, {', '.join(read)} FROM {PUBLISHED_TABLE}"):
        said = {
            column.name: _of_kind(column.kind, value) if column.group != "measured" or success == "success" else None
            for column, value in zip(COLUMNS, values, strict=True)
        }
        said |= {"run": PUBLISHED_TABLE, "row_id": f"{PUBLISHED_TABLE}:{number}"}
        yield (*said.values(), *(None for _ in QUALITY))


def _spelling(column: RowColumn, present: set[str]) -> str:
    """A column of the published table by its name there, or NULL."""
    spellings = [column.name, *(old for old, own in PUBLISHED_NAMES.items() if own == column.name)]
    return next((quoted(one) for one in spellings if one in present), "NULL")


def _of_kind(kind: type, value: object) -> Value:
    """The value where it is of this kind; a whole number is a number too."""
    if kind is float:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    return value if isinstance(value, kind) else None


# ------------------------------------------------------------------------------- those asked for


def _groups(group_by: Sequence[str]) -> list[str]:
    """The columns to group by, each once."""
    for name in group_by:
        if name not in groupable():
            raise UnknownName("column to group by", name, groupable())
    return list(dict.fromkeys(group_by))


def _condition(where: Mapping[str, object], certified_only: bool) -> pl.Expr:
    """Which rows are asked for; parameters and errors as in `query`."""
    wanted = pl.col("certified") == 1 if certified_only else pl.lit(True)
    for name, given in where.items():
        if name not in BY_NAME and name not in QUALITY_WORDS:
            raise UnknownName("column to ask for", name, [*BY_NAME, *QUALITY_WORDS])
        values = [_value(name, one) for one in (given if isinstance(given, list | tuple) else [given])]
        wanted &= pl.col(name).is_in(pl.Series(values, dtype=SCHEMA[name]), nulls_equal=True)
    return wanted


def _value(name: str, given: object) -> Value:
    if name in QUALITY_WORDS:
        if given not in (None, *QUALITY_WORDS[name]):
            raise UnknownName(name, given, QUALITY_WORDS[name])
        return given
    value = parsed(BY_NAME[name], given) if isinstance(given, str) else checked(BY_NAME[name], given)
    if isinstance(value, Reason):
        raise RowError([value])
    return value


# ------------------------------------------------------------------------------------ what changed


def _changes(old: Mapping | None, new: Mapping | None) -> Iterable[tuple]:
    row = new or old or {}
    head = (row["row_id"], row["model"], row["mechanism"], row["mechanism_variant"])
    if old is None or new is None:
        return [(*head, "added" if old is None else "gone", None, None, None)]
    changed = [name for name in row if name not in UNCOMPARED and old[name] != new[name]]
    return [(*head, "changed", name, _json(old[name]), _json(new[name])) for name in changed]


def _json(value: object) -> str | None:
    return None if value is None else json.dumps(value)

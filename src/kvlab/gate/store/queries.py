"""Questions to the store; every answer says which tier its numbers have earned, grouped or not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import polars as pl

from kvlab.core.errors import CapabilityError, StorageError, UnknownName
from kvlab.core.records import write_table
from kvlab.gate.catalogue.columns import COLUMNS
from kvlab.gate.store.database import RowStore
from kvlab.gate.store.migrations import PUBLISHED_TABLE, quoted
from kvlab.gate.store.selection import CERTIFIED, condition, everything, groups, listed, published_columns, schema

OWN_FILES = ("", "-wal", "-shm", "-journal")
"""Endings of the store's own files: the database and what SQLite keeps beside it while it is open."""

QUALITY_KEYS = ("earned_tier", "certified", "derived_status", "quality_eval_id", "registry_digest")
"""Part of every grouping: an average never mixes what is certified with what is not, nor what one registry allows with
what another does."""

BEST = {
    "kv_bytes": "ASC",
    "bits_per_value": "ASC",
    "kl": "ASC",
    "delta_nll": "ASC",
    "top1_agreement": "DESC",
    "compression_ratio": "ASC",
}
"""What can be best, and which way: the order in which the best comes first. Nothing that is not judged is among it."""

UNCOMPARED = ("run", "replay")
"""Columns in which two runs always differ: their name, and which items were drawn to be measured again, and when."""

UNJUDGED = tuple(column.name for column in COLUMNS if not column.judged)
"""Times, memory and rates of speculation, which no evidence vouches for."""

SUMMARIES = {
    "mean_bits_per_value": ("avg", "bits_per_value"),
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
        Without `group_by` or with `best`: rows, with every column of `schema`, of certified ones every judged one. With
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
    names = groups(group_by)
    wanted, values = condition(where or {}, certified_only)
    if best in UNJUDGED:
        raise CapabilityError(
            f"{best} is not judged: no evidence says what it is, so nothing is chosen by it;"
            f" allowed: {', '.join(BEST)}",
            code="capability.unjudged",
        )
    if names and best is None:
        return _grouped(store, names, wanted, values)
    if best is not None:
        found = _best(store, names, best, wanted, values)
    else:
        statement = f"SELECT {listed(schema())} FROM {everything(store)} WHERE {wanted} ORDER BY e.run, e.row_id"
        found = _frame(store, statement, values, schema())
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
    return [*found, PUBLISHED_TABLE] if published_columns(store) else found


# ----------------------------------------------------------------------------------------- parts


def _best(store: RowStore, names: Sequence[str], best: str, wanted: str, values: Sequence) -> pl.DataFrame:
    if best not in BEST:
        raise UnknownName("measure that can be best", best, BEST)
    each = f"PARTITION BY {listed(names)} " if names else ""
    ranked = (
        f"SELECT {listed(schema())}, row_number() OVER "
        f"({each}ORDER BY e.{quoted(best)} {BEST[best]}, e.run, e.row_id) AS place "
        f"FROM {everything(store)} WHERE {wanted} AND e.{quoted(best)} IS NOT NULL"
    )
    order = listed([*names, "run", "row_id"])
    statement = f"SELECT {listed(schema())} FROM ({ranked}) e WHERE e.place = 1 ORDER BY {order}"
    return _frame(store, statement, values, schema())


def _grouped(store: RowStore, names: Sequence[str], wanted: str, values: Sequence) -> pl.DataFrame:
    keys = list(dict.fromkeys([*names, *QUALITY_KEYS]))
    summaries = ", ".join(f"{function}(e.{quoted(name)})" for function, name in SUMMARIES.values())
    statement = (
        f"SELECT {listed(keys)}, count(*), {summaries} FROM {everything(store)} WHERE {wanted} "
        f"GROUP BY {listed(keys)} ORDER BY {listed(keys)}"
    )
    kinds = {key: schema()[key] for key in keys} | {"rows": pl.Int64()} | dict.fromkeys(SUMMARIES, pl.Float64())
    return _frame(store, statement, values, kinds)


def _frame(store: RowStore, statement: str, values: Sequence, kinds: Mapping[str, pl.DataType]) -> pl.DataFrame:
    return pl.DataFrame(store.select(statement, values), schema=dict(kinds), orient="row")


def _changes(old: Mapping | None, new: Mapping | None) -> Iterable[tuple]:
    row = new or old or {}
    head = (row["row_id"], row["model"], row["mechanism"], row["mechanism_variant"])
    if old is None or new is None:
        return [(*head, "added" if old is None else "gone", None, None, None)]
    changed = [name for name in row if name not in UNCOMPARED and old[name] != new[name]]
    return [(*head, "changed", name, _json(old[name]), _json(new[name])) for name in changed]


def _json(value: object) -> str | None:
    return None if value is None else json.dumps(value)

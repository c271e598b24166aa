"""What a query looks at: every row of the store under one schema, and which of them are asked for.

Values are bound, never written into a statement; names come from the catalogue or are refused. The published study's
table is read in place as one more run: its rows carry no claim, so they are never certified, and a run of it that did
not succeed shows no measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from kvlab.core.errors import UnknownName
from kvlab.gate.catalogue import BY_NAME, PUBLISHED_NAMES, STATUSES, TIERS, groupable, sql_columns
from kvlab.gate.catalogue.values import RowError, Value, checked, parsed
from kvlab.gate.reasons import Reason
from kvlab.gate.store.database import RowStore
from kvlab.gate.store.migrations import PUBLISHED_TABLE, columns, quoted

CERTIFIED = TIERS[0]
QUALITY = (
    ("registry_digest", "TEXT"),
    ("current_digest", "TEXT"),
    ("earned_tier", "TEXT"),
    ("derived_status", "TEXT"),
    ("loss_metric", "TEXT"),
    ("loss", "REAL"),
    ("loss_share", "REAL"),
    ("reasons", "TEXT"),
    ("certified", "INTEGER"),
    ("replay", "TEXT"),
)
"""What the gate claims of a row (`kvlab.gate.store.ingest.ClaimRecord`); all null where it was never asked."""

QUALITY_WORDS = {"earned_tier": TIERS, "derived_status": STATUSES}
POLARS = {"TEXT": pl.String(), "REAL": pl.Float64(), "INTEGER": pl.Int64()}


def schema() -> dict[str, pl.DataType]:
    """Every column that a row of a query has, and its type."""
    return {name: POLARS[kind] for name, kind in (*sql_columns(), *QUALITY)}


def listed(names: Iterable[str]) -> str:
    """Columns of ``e`` for a statement."""
    return ", ".join(f"e.{quoted(name)}" for name in names)


# ---------------------------------------------------------------------------------- all the rows


def everything(store: RowStore) -> str:
    """Both tables of rows as one, for a FROM clause, under the alias ``e``."""
    wanted = [f"r.{quoted(name)}" for name, _ in sql_columns()] + [f"c.{quoted(name)}" for name, _ in QUALITY]
    own = f"SELECT {', '.join(wanted)} FROM rows r LEFT JOIN claims c ON c.run = r.run AND c.row_id = r.row_id"
    present = published_columns(store)
    return f"({own} UNION ALL {_published(present)}) e" if present else f"({own}) e"


def published_columns(store: RowStore) -> set[str]:
    """The columns of the published study's table, in lower case; empty in a store that does not hold it."""
    return columns(store.connection, PUBLISHED_TABLE)


def _published(present: set[str]) -> str:
    """The published study's table with the catalogue's columns, as far as it has them."""
    key = "p.id" if "id" in present else "p.rowid"
    fixed = {"run": f"'{PUBLISHED_TABLE}'", "row_id": f"'{PUBLISHED_TABLE}:' || {key}"}
    wanted = [fixed.get(name) or _published_column(name, kind, present) for name, kind in sql_columns()]
    return f"SELECT {', '.join([*wanted, *('NULL' for _ in QUALITY)])} FROM {PUBLISHED_TABLE} p"


def _published_column(name: str, kind: str, present: set[str]) -> str:
    """A column's values where they are of its kind: that table kept whatever it was given."""
    spellings = [name, *(old for old, own in PUBLISHED_NAMES.items() if own == name)]
    source = next((f"p.{quoted(spelling)}" for spelling in spellings if spelling in present), None)
    if source is None:
        return "NULL"
    allowed = {
        "TEXT": f"typeof({source}) = 'text'",
        "INTEGER": f"typeof({source}) = 'integer'",
        "REAL": f"typeof({source}) IN ('real', 'integer') AND abs({source}) < 9e999",
    }[kind]
    if BY_NAME[name].group == "measured" and "status" in present:
        allowed += " AND p.status = 'success'"
    return f"CASE WHEN {allowed} THEN {f'CAST({source} AS REAL)' if kind == 'REAL' else source} END"


# ------------------------------------------------------------------------------- those asked for


def groups(group_by: Sequence[str]) -> list[str]:
    """The columns to group by, each once; `UnknownName` for one that `groupable` does not name."""
    for name in group_by:
        if name not in groupable():
            raise UnknownName("column to group by", name, groupable())
    return list(dict.fromkeys(group_by))


def condition(where: Mapping[str, object], certified_only: bool) -> tuple[str, list[Value]]:
    """An SQL condition on ``e``, and the values that it binds, in order.

    Parameters
    ----------
    where : mapping
        Column to value, to a list of values, or to None for rows that do not say; a text is read as the column's kind.
    certified_only : bool
        Whether only rows are asked for that have earned the best tier and came out the same when measured again.

    Raises
    ------
    UnknownName
        A name that is none.
    RowError
        A value that its column cannot hold.
    """
    parts, values = ["TRUE"], []
    for name, given in where.items():
        if name not in BY_NAME and name not in QUALITY_WORDS:
            raise UnknownName("column to ask for", name, [*BY_NAME, *QUALITY_WORDS])
        wanted = [_value(name, one) for one in (given if isinstance(given, list | tuple) else [given])]
        said = [value for value in wanted if value is not None]
        options = [f"e.{quoted(name)} IN ({', '.join('?' * len(said))})"]
        options += [f"e.{quoted(name)} IS NULL"] if len(said) < len(wanted) else []
        parts.append(f"({' OR '.join(options)})")
        values += said
    if certified_only:
        parts.append("e.certified = 1")
    return " AND ".join(parts), values


def _value(name: str, given: object) -> Value:
    if name in QUALITY_WORDS:
        if given not in (None, *QUALITY_WORDS[name]):
            raise UnknownName(name, given, QUALITY_WORDS[name])
        return given
    value = parsed(BY_NAME[name], given) if isinstance(given, str) else checked(BY_NAME[name], given)
    if isinstance(value, Reason):
        raise RowError([value])
    return value

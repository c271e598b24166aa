"""The fields of a row: each declared once, and everything that is made of them."""

from kvlab.gate.catalogue.columns import (
    BY_NAME,
    COLUMNS,
    COMPRESSION,
    DECLARED,
    MECHANISMS,
    SCOPES,
    SPECULATIVE,
    STATUSES,
    TIERS,
    RowFields,
)
from kvlab.gate.catalogue.declaration import RowColumn
from kvlab.gate.catalogue.generated import (
    SCHEMA,
    config_schema,
    environment,
    flags,
    from_config,
    from_flags,
    groupable,
    read_config,
    row_schema,
    sql_columns,
)
from kvlab.gate.catalogue.rows import EMBEDDED, EVIDENCE, PUBLISHED_NAMES, Row, checked_row, read_rows, row_id
from kvlab.gate.catalogue.values import RowError

__all__ = [
    "BY_NAME",
    "COLUMNS",
    "COMPRESSION",
    "DECLARED",
    "EMBEDDED",
    "EVIDENCE",
    "MECHANISMS",
    "PUBLISHED_NAMES",
    "SCHEMA",
    "SCOPES",
    "SPECULATIVE",
    "STATUSES",
    "TIERS",
    "Row",
    "RowColumn",
    "RowError",
    "RowFields",
    "checked_row",
    "config_schema",
    "environment",
    "flags",
    "from_config",
    "from_flags",
    "groupable",
    "read_config",
    "read_rows",
    "row_id",
    "row_schema",
    "sql_columns",
]

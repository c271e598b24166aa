"""A study's page in Markdown: what it asks, and its tables, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from kvlab.errors import UserError
from kvlab.kvstore.studies.table import Table
from kvlab.records import write_text
from kvlab.report import format as fmt


def write(study: str, records: Sequence[Path], out: Path) -> None:
    """Write the page of a study.

    Parameters
    ----------
    study : str
        A module of `kvlab.kvstore.studies`: its `TITLE` and `ABOUT` head the page, its `read` and `tables` fill it.
    records : sequence of Path
        One for each model, the leading one first.
    out : Path
        The page.

    Raises
    ------
    StorageError
        A file is no record of this study.
    UserError
        A model is there twice.
    """
    asked = import_module(f"kvlab.kvstore.studies.{study}")
    found = {}
    for path in records:
        record = asked.read(path)
        if record.model in found:
            raise UserError(f"{path} is of the model {record.model!r}, and so is a record before it; name each once")
        found[record.model] = asked.tables(record)
    parts = [f"# {asked.TITLE}", asked.ABOUT]
    for model, tables in found.items():
        parts += [f"## {fmt.safe(model)}"] if len(found) > 1 else []
        for table in tables:
            parts += _parts(table, "###" if len(found) > 1 else "##")
    write_text(out, "\n\n".join(parts) + "\n")


def _parts(table: Table, mark: str) -> Iterator[str]:
    yield f"{mark} {table.title}"
    if table.text:
        yield table.text
    if table.rows:
        yield fmt.table(table.header, table.rows)

"""A study's page in Markdown: what it asks, and its tables, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from kvlab.base.errors import UserError
from kvlab.base.records import write_text
from kvlab.pages import format as fmt
from kvlab.studies.table import Table


def write(study: str, records: Sequence[Path], out: Path) -> None:
    """Write the page of a study.

    Parameters
    ----------
    study : str
        A folder of `kvlab.studies`: `read` of its `record` reads what `TITLE`, `ABOUT` and `tables` of its `tables`
        make the page of.
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
    kept, told = (import_module(f"kvlab.studies.{study}.{part}") for part in ("record", "tables"))
    found = {}
    for path in records:
        record = kept.read(path)
        if record.model in found:
            raise UserError(f"{path} is of the model {record.model!r}, and so is a record before it; name each once")
        found[record.model] = told.tables(record)
    parts = [f"# {told.TITLE}", told.ABOUT]
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

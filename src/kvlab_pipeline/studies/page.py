"""A study's page in Markdown: what it asks, and its tables, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from kvlab.core.errors import UserError
from kvlab.core.records import write_text
from kvlab.output import format as fmt
from kvlab_pipeline.rendering import svg
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.rendering.tables import TitledTable
from kvlab_pipeline.rendering.tables import table as markdown
from kvlab_pipeline.studies.record import read_record


def write(study: str, records: Sequence[Path], out: Path) -> None:
    """Write the page of a study.

    Parameters
    ----------
    study : str
        A folder of `kvlab_pipeline.studies`: `TITLE`, `ABOUT` and `tables` of its `tables` make the page of the
        `RECORD` of its `record`. Where there is a `figure` too, it is drawn of each model, beside the page under
        its slug.
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
    kept, told = (import_module(f"kvlab_pipeline.studies.{study}.{part}") for part in ("record", "tables"))
    found, figures = {}, {}
    for path in records:
        record = read_record(path, kept.RECORD, study)
        if record.model in found:
            raise UserError(f"{path} is of the model {record.model!r}, and so is a record before it; name each once")
        found[record.model] = told.tables(record)
        figures |= {record.model: told.figure(record)} if hasattr(told, "figure") else {}
    parts = [f"# {told.TITLE}", told.ABOUT]
    for model, tables in found.items():
        parts += [f"## {fmt.safe(model)}"] if len(found) > 1 else []
        parts += _drawn(figures[model], Path(out).with_name(f"{model}.svg")) if model in figures else []
        for table in tables:
            parts += _parts(table, "###" if len(found) > 1 else "##")
    write_text(out, "\n\n".join(parts) + "\n")


def _drawn(figure: Figure, path: Path) -> list[str]:
    """Write a figure, and say it in the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    svg.write(figure, path)
    return [f"![{figure.title}]({path.name})", figure.note]


def _parts(table: TitledTable, mark: str) -> Iterator[str]:
    yield f"{mark} {table.title}"
    if table.text:
        yield table.text
    if table.over:
        yield markdown(table.over, table.columns)

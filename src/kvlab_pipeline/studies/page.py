"""A study's page in Markdown: its template over the records of all models.

A study that stands on a page of its own has in its folder `RECORD`, in `record`; in `tables`, what its template places;
and the template itself, ``templates/STUDY.md.j2``, which fills the frame ``page.md.j2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvlab.core.errors import UserError
from kvlab.core.records import write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy
from kvlab_pipeline.rendering import svg
from kvlab_pipeline.rendering.figure import Figure
from kvlab_pipeline.studies.record import StudyRecord, read_record

HERE = Path(__file__).parent


def write(study: str, records: Sequence[Path], out: Path) -> None:
    """Write the page of a study.

    Parameters
    ----------
    study : str
        A folder of `kvlab_pipeline.studies`. Where its `tables` has a `figure` too, it is drawn of each model, beside
        the page under its slug.
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
    found: dict[str, StudyRecord] = {}
    for path in records:
        record = read_record(path, kept.RECORD, study)
        if record.model in found:
            raise UserError(f"{path} is of the model {record.model!r}, and so is a record before it; name each once")
        found[record.model] = record
    figures = {model: told.figure(record) for model, record in found.items()} if hasattr(told, "figure") else {}
    text = rendered(study, list(found.values()), figures)
    for model, figure in figures.items():
        out.parent.mkdir(parents=True, exist_ok=True)
        svg.write(figure, out.with_name(f"{model}.svg"))
    write_text(out, text)


def rendered(study: str, records: Sequence[StudyRecord], figures: dict[str, Figure]) -> str:
    """The page; a table without rows is not there, but what is said before it is."""
    parts_of = import_module(f"kvlab_pipeline.studies.{study}.tables").parts
    models = [
        (record, {name: part or "" for name, part in parts_of(record).items()}, figures.get(record.model))
        for record in records
    ]
    template = environment(HERE, HERE / study / "templates").get_template(f"{study}.md.j2")
    return tidy(template.render(fmt=fmt, models=models, h="###" if len(models) > 1 else "##"))

"""What a study's page prints of a record."""

from __future__ import annotations

from kvlab_pipeline.studies import page
from kvlab_pipeline.studies.record import StudyRecord


def rows(table: str) -> list[tuple[str, ...]]:
    """The cells under the headings of a Markdown table."""
    return [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in table.splitlines()[2:]]


def whole(study: str, record: StudyRecord, parts: dict[str, str | None]) -> str:
    """The page of one record, on which each part of it stands."""
    text = page.rendered(study, [record], {})
    assert [name for name, part in parts.items() if part and part not in text] == []
    return text

"""The studies by what their folders hold; no list names them.

``params.py``
    A `Section` with a ``key``: its section of params.yaml (see `settings`).
``plan.py``
    ``cells(params, engine)``, and ``READS``: the keys of params.yaml that they are planned from (see `lab.plan`).
``chapter.py``
    ``CHAPTER``: its chapter of the report.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from kvlab.base.folders import holding
from kvlab.lab.plan import STUDY_FOLDERS
from kvlab.studies.chapter import Chapter


@cache
def chapters() -> dict[str, Chapter]:
    """The chapters of the report by study, in the order of their first sections."""
    found = {study: import_module(name).CHAPTER for study, name in modules().items()}
    return dict(sorted(found.items(), key=lambda item: min(section.place for section in item[1].sections.values())))


def modules() -> dict[str, str]:
    """The module of each study's chapter; the report loads them by name."""
    return {study: f"{STUDY_FOLDERS}.{study}.chapter" for study in holding(STUDY_FOLDERS, "chapter")}

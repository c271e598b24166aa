"""The studies by what their folders hold; no list names them.

``params.py``
    A `Section` with a ``key``: its section of params.yaml (see `settings`).
``plan.py``
    ``cells(params, engine)``, and ``READS``: the keys of params.yaml that they are planned from (see `jobs.plan`).
``chapter.py``
    ``CHAPTER``: its chapter of the report.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvlab.core.code import parsed
from kvlab.core.folders import holding
from kvlab_pipeline.jobs.plan import STUDY_FOLDERS

if TYPE_CHECKING:
    from kvlab_pipeline.studies.chapter import Chapter  # what a chapter is made of takes a while to load


@cache
def chapters() -> dict[str, Chapter]:
    """The chapters of the report by study, in the order of their first sections."""
    found = {study: import_module(name).CHAPTER for study, name in modules().items()}
    return dict(sorted(found.items(), key=lambda item: min(section.place for section in item[1].sections.values())))


def figure_names() -> list[str]:
    """The names of all figures, as the chapters' files have them: a workflow needs them before anything is loaded."""
    found = []
    for name in modules().values():
        calls = (node for node in ast.walk(parsed(find_spec(name).origin)) if isinstance(node, ast.keyword))
        figures = next((call.value for call in calls if call.arg == "figures"), None)
        found += [key.value for key in figures.keys] if figures else []
    return found


def modules() -> dict[str, str]:
    """The module of each study's chapter; the report loads them by name."""
    return {study: f"{STUDY_FOLDERS}.{study}.chapter" for study in holding(STUDY_FOLDERS, "chapter")}

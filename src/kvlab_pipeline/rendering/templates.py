"""The templates of FINDINGS.md: the report's own, and of each study that of its part of the page."""

from __future__ import annotations

from pathlib import Path

from kvlab.output.rendering import environment, tidy

PACKAGE = Path(__file__).parents[1]
TEMPLATES = (  # found by place, as codecs are by name
    PACKAGE / "report" / "templates",
    *sorted(path for path in (PACKAGE / "studies").iterdir() if path.is_dir()),
)


def render(template: str, **context) -> str:
    """One template over a context, tidied."""
    return tidy(environment(*TEMPLATES).get_template(template).render(context))

"""Jinja templates to tidy Markdown."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **context) -> str:
    """One template over a context, tidied."""
    return tidy(environment(TEMPLATES).get_template(template).render(context))


@functools.cache
def environment(folder: Path) -> jinja2.Environment:
    """The templates of a folder; they refuse a name nobody set."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )
    made.filters |= {"code": lambda name: f"`{name}`", "listing": listing}
    made.globals["needing"] = needing
    return made


def needing(effect: dict) -> str:
    """How many windows an effect that is not resolved would take."""
    if not effect["needed"]:
        return f" (this run has {effect['windows']} windows and sees no effect at all)"
    return f" (about {effect['needed']} windows needed, this run has {effect['windows']})"


def listing(names) -> str:
    """``a, b and c``."""
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last


def tidy(text: str) -> str:
    """No trailing blanks, never two empty lines in a row, one newline at the end."""
    lines = []
    for line in text.splitlines():
        line = line.rstrip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"

"""Jinja templates to tidy Markdown."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2

from kvlab.output.format import POST_HOC
from kvlab.output.markdown import cell, code

FEW_LINES = 2


@functools.cache
def environment(*folders: Path) -> jinja2.Environment:
    """The templates of some folders; they refuse a name nobody set.

    Markdown is printed as it is; what a person named goes through `plain` (words) or `code`.
    """
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )
    made.filters |= {"code": code, "plain": cell, "listing": listing, "folded": folded}
    made.globals |= {"needing": needing, "post_hoc": POST_HOC}
    return made


def needing(effect: dict) -> str:
    """How large an effect that is not resolved may be, and how many windows it would take."""
    run = f"at most {effect['largest']} either way; this run has {effect['windows']} windows"
    if not effect["needed"]:
        return f" ({run} and sees no effect at all)"
    return f" ({run}, about {effect['needed']} are needed: {POST_HOC})"


def listing(names, word: str = "and") -> str:
    """``a, b and c``, or with another word before the last."""
    *head, last = names
    return f"{', '.join(head)} {word} {last}" if head else last


def folded(section: str, summary: str) -> str:
    """A section with its heading in sight and the rest folded away; one of a few lines stays open."""
    heading, _, rest = section.strip().partition("\n")
    rest = rest.strip()
    if len([line for line in rest.splitlines() if line]) <= FEW_LINES:
        return section
    return f"{heading}\n\n<details><summary>{summary}</summary>\n\n{rest}\n\n</details>"


def tidy(text: str) -> str:
    """No trailing blanks, never two empty lines in a row, one newline at the end."""
    lines = []
    for line in text.splitlines():
        line = line.rstrip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"

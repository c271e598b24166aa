"""Markdown of values that nobody vouches for: what a row says can be read, and changes the shape of nothing."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jinja2

from kvlab.output.terminal import NOTHING, printable

# What starts a link, emphasis, code, mathematics, HTML, a mention or a cell of its own. An underscore inside a word
# starts nothing, nor does a bracket that no link, reference or footnote can be made of; a page reads better with these
# as they are. What a value ends with may be followed by anything. Code points that move the writing or break the line
# are refused by the catalogue, but a report may be of rows that it refused; `printable` takes them out.
MARKDOWN = re.compile(
    r"""
      [`*|~@#$]
    | \\ (?= [!-/:-@\[-`{-~] | \Z )               # before a letter it escapes nothing
    | < (?= [a-z/!?] | \Z )                       # an element, <address>; not "a < b"
    | (?<! [=-] ) >                               # not of => and ->
    | & (?= [#a-z] | \Z )                         # a character reference
    | (?<! [a-z0-9] ) _ | _ (?! [a-z0-9] )
    | \[ (?= [\[^] ) | (?<= ! ) \[                # [[page]], a footnote, an image
    | (?<! . ) \s* \[ (?! [-+.\de]+ , )           # [x] and [name], which begin a line; not [0.1, 0.2]
    | \] (?= [(\[:] )                             # [words](address), [words][name], [name]: address
    | : (?= / | [\w+-]+ : | [\w+-]* \Z )          # an address, :emoji:
    | (?<= www ) \.
    """,
    re.IGNORECASE | re.VERBOSE,
)


def cell(value: object) -> object:
    """A value as it may stand in a cell: on one line, and none of its characters is Markdown or HTML.

    What would be syntax becomes a character reference, which every Markdown shows as the character and none reads
    as syntax; unlike a backslash it is understood in the summary of a fold too, which is HTML.
    """
    if isinstance(value, jinja2.Undefined):
        return value
    if value is None or value == "":
        return NOTHING
    return MARKDOWN.sub(lambda found: "".join(f"&#{ord(one)};" for one in found[0]), printable(value))


def code(value: object) -> object:
    """A value as code, on one line: its fence is longer than any run of backticks in it."""
    if isinstance(value, jinja2.Undefined):
        return value
    if value is None or value == "":
        return NOTHING
    text = printable(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    return f"{fence}{space}{text}{space}{fence}"


def render(template: Path, **context) -> str:
    """One template, a file, over a context, with never two empty lines in a row."""
    return re.sub(r"\n{3,}", "\n\n", environment(template.parent).get_template(template.name).render(**context))


@functools.cache
def environment(folder: Path) -> jinja2.Environment:
    """Every value that a template prints goes through `cell`, so that none can be forgotten."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        finalize=cell,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # `cell` escapes HTML too
    )
    made.filters |= {"figure": _figure, "words": words}
    return made


def words(name: str) -> str:
    """A name of several words, as they are read."""
    return name.replace("_", " ")


def _figure(number: float | None) -> str | None:
    return None if number is None else f"{number:.4g}"

"""From FINDINGS.md to the page's body: headings with ids, tables in regions, a figure for each picture.

Raw HTML in the text is shown, not obeyed. The one exception is the pair of lines by which the findings fold a
recipe away, ``<details><summary><code>ID</code></summary>`` and ``</details>``, recognised letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvlab.errors import Fault

if TYPE_CHECKING:
    from markdown_it.token import Token

PICTURE = re.compile(r"figures/(\w+)\.svg")
FOLD = re.compile(r"<details><summary><code>([\w.-]+)</code></summary>")
UNFOLD = "</details>"


@dataclass(frozen=True)
class Body:
    """The text as HTML.

    Parameters
    ----------
    title : str
        The first heading.
    sections : tuple of (str, str)
        Id and words of each heading of the second level.
    html : str
        Everything, the title included.
    """

    title: str
    sections: tuple[tuple[str, str], ...]
    html: str


def body(text: str, figure: Callable[[str, str], str]) -> Body:
    """Turn Markdown into the page's body.

    Parameters
    ----------
    text : str
        FINDINGS.md.
    figure : callable
        ``(name, alt) -> HTML``: what stands in the place of the picture ``figures/NAME.svg``.

    Raises
    ------
    Fault
        When the text has no title or links a picture that is none of the report's figures.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("image", lambda _self, tokens, index, _options, _env: picture(tokens[index], figure))
    tokens = parser.parse(text)
    headings = named_headings(tokens)
    titles = [words for level, _, words in headings if level == "h1"]
    if not titles:
        raise Fault("the findings have no title; a page without one was not written")
    html = parser.renderer.render(regions(folds(unwrapped(tokens))), parser.options, {})
    return Body(titles[0], tuple((anchor, words) for level, anchor, words in headings if level == "h2"), html)


def picture(token: Token, figure: Callable[[str, str], str]) -> str:
    """The figure that a picture stands for."""
    found = PICTURE.fullmatch(token.attrGet("src") or "")
    if not found:
        raise Fault(f"the findings show {token.attrGet('src')!r}, which is no figure of the report")
    return figure(found[1], token.content)


def named_headings(tokens: list[Token]) -> list[tuple[str, str, str]]:
    """Give every heading an id of its own words; returns level, id and words of each."""
    found, taken = [], set()
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            words = plain(inline)
            anchor = unique(re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "section", taken)
            opening.attrSet("id", anchor)
            found.append((opening.tag, anchor, words))
    return found


def plain(inline: Token) -> str:
    """The words of a heading without their markup."""
    return "".join(token.content for token in inline.children or [])


def unique(name: str, taken: set[str]) -> str:
    """`name`, with a number behind it when it is taken."""
    free = name
    while free in taken:
        free = f"{name}-{len(taken)}"
    taken.add(free)
    return free


def unwrapped(tokens: list[Token]) -> list[Token]:
    """Take the paragraph off every picture that stands alone: a figure may not stand inside one."""
    for before, inline, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if [child.type for child in inline.children or []] == ["image"]:
            before.hidden = after.hidden = True
    return tokens


def folds(tokens: list[Token]) -> list[Token]:
    """Turn the paragraphs that open and close a fold into the elements that they name."""
    done, index, depth = [], 0, 0
    while index < len(tokens):
        inline = tokens[index + 1] if tokens[index].type == "paragraph_open" else None
        opening = inline and FOLD.fullmatch(inline.content)
        if not opening and not (inline and inline.content == UNFOLD and depth):
            done.append(tokens[index])
            index += 1
            continue
        depth += 1 if opening else -1
        done.append(raw(opening[0] if opening else UNFOLD))
        index += 3
    if depth:
        raise Fault("the findings open a fold that they do not close")
    return done


def regions(tokens: list[Token]) -> list[Token]:
    """Put every table into a region that scrolls on its own and is named by the heading above it."""
    done, heading, taken = [], "", set()
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = plain(tokens[index + 1])
        if token.type == "th_open":
            token.attrSet("scope", "col")
        if token.type in ("th_open", "td_open"):
            aligned(token)
        if token.type == "table_open":
            done.append(raw(region(unique(f"Table: {heading}", taken))))
        done.append(token)
        if token.type == "table_close":
            done.append(raw("</div>\n"))
    return done


def region(label: str) -> str:
    """The opening tag of a table's region; a keyboard reaches it, so that its rows can be scrolled."""
    from markupsafe import escape

    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">\n'


def aligned(token: Token) -> None:
    """A class in place of the style by which a column of numbers is set flush right."""
    if token.attrs.pop("style", None) == "text-align:right":
        token.attrSet("class", "number")


def raw(html: str) -> Token:
    """HTML of this module's own making."""
    from markdown_it.token import Token

    return Token("html_block", "", 0, content=html)

"""From FINDINGS.md to a page's body: headings with ids, tables in regions, folded sections, figures for pictures.

markdown-it-py turns the Markdown into HTML; raw HTML in the text is shown, not obeyed. The one exception is the pair
of paragraphs by which a text folds a part of itself away, ``<details><summary>WORDS</summary>`` and ``</details>``,
each alone between empty lines, recognised letter by letter. A fold that begins right after a heading of the second
level is that section's: its heading stands in the fold's summary, before WORDS.
"""

from __future__ import annotations

import html as characters
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvlab.core.errors import Fault

if TYPE_CHECKING:
    from markdown_it.token import Token

PICTURE = re.compile(r"figures/(\w+)\.svg")
FOLD = re.compile(r"<details( open)?>\s*<summary>([^\n]+)</summary>")
UNFOLD = "</details>"
MARKUP = re.compile(r"&lt;(code|b|strong|em)&gt;(.*?)&lt;/\1&gt;")  # what a summary may hold


@dataclass(frozen=True)
class PageBody:
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


def body(text: str, figure: Callable[[str, str], str]) -> PageBody:
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
    tokens = folds(parser.parse(text))
    titles = [plain(inline) for opening, inline in pairwise(tokens) if opening.tag == "h1" and opening.nesting > 0]
    if not titles:
        raise Fault("the findings have no title; a page without one was not written", code="fault.no-title")
    sections = named(tokens)
    html = parser.renderer.render(regions(sectioned(unwrapped(tokens))), parser.options, {})
    return PageBody(titles[0], tuple(sections), html)


def picture(token: Token, figure: Callable[[str, str], str]) -> str:
    """The figure that a picture stands for."""
    found = PICTURE.fullmatch(token.attrGet("src") or "")
    if not found:
        raise Fault(
            f"the findings show {token.attrGet('src')!r}, which is no figure of the report", code="fault.unknown-figure"
        )
    return figure(found[1], token.content)


def named(tokens: list[Token]) -> list[tuple[str, str]]:
    """Give every heading an id of its own words; returns those of the second level with their words."""
    found, taken = [], set()
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            words = plain(inline)
            anchor = unique(re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "section", taken)
            opening.attrSet("id", anchor)
            found += [(anchor, words)] if opening.tag == "h2" else []
    return found


def sectioned(tokens: list[Token]) -> list[Token]:
    """Put the heading of a folded section into the summary of its fold."""
    done, ends, depth = [], [], 0  # the depths at which a section's fold ends
    for at, token in enumerate(tokens):
        step = token.meta.get("step", 0)
        depth += step
        if step > 0 and at >= 3 and tokens[at - 3].tag == "h2":
            heading = done[-3:]
            anchor = heading[0].attrs.pop("id")  # an address leads inside the fold, which opens it
            words = raw(f' <span>{token.meta["summary"]}</span></summary>\n<div id="{anchor}">\n')
            done[-3:] = [raw(f'<details class="section"{token.meta["open"]}>\n<summary>'), *heading, words]
            ends.append(depth - 1)
        elif step < 0 and ends and ends[-1] == depth:
            ends.pop()
            done.append(raw("</div>\n</details>\n"))
        else:
            done.append(token)
    return done


def plain(inline: Token) -> str:
    """The words of a heading without their markup."""
    return "".join(token.content for token in inline.children or [])


def unique(name: str, taken: set[str]) -> str:
    """`name`, followed by a number when it is taken."""
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
        done.append(fold_of(opening) if opening else raw(f"{UNFOLD}\n", step=-1))
        index += 3
    if depth:
        raise Fault("the findings open a fold that they do not close", code="fault.open-fold")
    return done


def fold_of(found: re.Match) -> Token:
    """The start of a fold, its summary's words escaped but for a few elements."""
    words = characters.escape(characters.unescape(found[2]), quote=False)
    summary, is_open = MARKUP.sub(r"<\1>\2</\1>", words), found[1] or ""
    html = f"<details{is_open}>\n<summary>{summary}</summary>\n"
    return raw(html, step=1, summary=summary, open=is_open)


def regions(tokens: list[Token]) -> list[Token]:
    """Put every table into a region that scrolls on its own and is named by the heading above it."""
    done, heading, taken = [], "", set()
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = plain(tokens[index + 1])
        if token.type == "th_open":
            token.attrSet("scope", "col")
        if token.type in ("th_open", "td_open"):
            style = token.attrs.pop("style", None)  # of a column of numbers; a class takes its place
            if style == "text-align:right":
                token.attrSet("class", "number")
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


def raw(html: str, **meta) -> Token:
    """HTML of this module's own making; `meta` says whether it begins (``step`` 1) or ends (-1) a fold."""
    from markdown_it.token import Token

    return Token("html_block", "", 0, content=html, meta=meta)

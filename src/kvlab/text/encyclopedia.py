"""A second text that is prose: Wikipedia articles that the wheel of gensim carries for its own tests.

The dump is of 2015, under CC BY-SA 3.0. Nothing of gensim is installed or run; the file is known by its hash, so the
text does not depend on a version of anything but of the parser that takes the markup away.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from xml.etree import ElementTree

from kvlab.core.errors import CorpusError, StorageError
from kvlab.core.wheels import WheelFile, read

DUMP = WheelFile(
    distribution="gensim",
    version="4.4.0",
    path="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
)
APPENDICES = re.compile(
    "(see also|references|notes|footnotes|bibliography|further reading|external links|sources|citations)$",
    re.IGNORECASE,
)
UNREAD_TAGS = frozenset({"ref", "table", "gallery", "math", "timeline", "imagemap"})
UNREAD_LINKS = re.compile(r"^\s*:?\s*(file|image|category|[a-z]{2,3}(-[a-z]+)?)\s*:", re.IGNORECASE)
MOST_MARKUP = 30_000  # characters that are read of an article, in whole sections: many articles beat long ones
MIN_WORDS = 20  # shorter paragraphs are headings, captions and items of lists
LEFTOVER = re.compile(r"</?[a-z]|\[\[|\]\]|\{\{|\}\}|\|thumb", re.IGNORECASE)  # opened and never closed
EMPTY = re.compile(r"\s*\([\s,;:]*\)")  # what stood in brackets was markup
SENTENCE = re.compile(r"[.!?][\"')\]]*$")


@dataclass(frozen=True)
class Article:
    """The prose of one article: paragraphs with an empty line between them."""

    title: str
    text: str


def extract() -> list[Article]:
    """The articles in the order of the dump, without redirects and without what is no prose.

    Raises
    ------
    CorpusError
        The wheel cannot be had, or is not the known one.
    """
    try:
        dump = bz2.decompress(read(DUMP))
    except StorageError as error:
        raise CorpusError(
            f"{error}; `corpus.other: encyclopedia` reads it: name `licences`, or a text file, instead",
            code="corpus.no-wheel",
        ) from None
    articles = [Article(title, prose(markup)) for title, markup in pages(dump)]
    return [article for article in articles if article.text]


def describe(articles: list[Article]) -> dict:
    """What was read: its source and licence, hash and size."""
    text = "\0".join(article.text for article in articles)
    return {
        "source": f"{DUMP.requirement}: {DUMP.path}",
        "source_sha256": DUMP.sha256,
        "licence": "CC BY-SA 3.0, the authors of Wikipedia",
        "parser": f"mwparserfromhell {version('mwparserfromhell')}",
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "documents": len(articles),
        "bytes": len(text.encode()),
    }


def pages(dump: bytes) -> Iterator[tuple[str, str]]:
    """Title and markup of every page that is an article and no redirect."""
    for _, element in ElementTree.iterparse(BytesIO(dump)):
        if element.tag.endswith("}page"):
            if element.findtext("{*}ns") == "0" and element.find("{*}redirect") is None:
                yield element.findtext("{*}title"), element.findtext("{*}revision/{*}text") or ""
            element.clear()


def prose(markup: str) -> str:
    """The paragraphs of an article's first sections that are sentences."""
    import mwparserfromhell

    code = mwparserfromhell.parse(first_sections(markup))
    for tag in code.filter_tags(matches=lambda tag: str(tag.tag).lower() in UNREAD_TAGS):
        _remove(code, tag)
    for link in code.filter_wikilinks(matches=lambda link: UNREAD_LINKS.match(str(link.title)) is not None):
        _remove(code, link)
    lines = (EMPTY.sub("", " ".join(line.split())) for line in code.strip_code().splitlines())
    return "\n\n".join(line for line in lines if _is_prose(line))


def first_sections(markup: str) -> str:
    """The sections before an article's appendices, as many as fit into `MOST_MARKUP` characters, one at least."""
    kept = ""
    for section in re.split(r"(?m)^(?===[^=])", markup):
        heading = re.match(r"==\s*(.*?)\s*==", section)
        if heading and APPENDICES.match(heading[1]):
            break
        if kept and len(kept) + len(section) > MOST_MARKUP:
            break
        kept += section
    return kept


def _is_prose(line: str) -> bool:
    return len(line.split()) >= MIN_WORDS and bool(SENTENCE.search(line)) and not LEFTOVER.search(line)


def _remove(code, node) -> None:
    """Take a node out; one that lay inside another is gone with it."""
    with contextlib.suppress(ValueError):
        code.remove(node)

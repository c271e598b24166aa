"""Wikipedia articles as prose: what is read of a dump, and what of its markup is left out."""

from __future__ import annotations

import bz2
from xml.sax.saxutils import escape

import pytest

from kvlab.core.errors import CorpusError, StorageError
from kvlab.text import encyclopedia
from refusals import refused

SENTENCE = (
    "The harbour was built in the last years of the century and has been the largest of the coast since then, by far."
)
OTHER = (
    "Its walls, older than the town itself, were taken down when the railway came, and nobody in the town missed them."
)
MARKUP = f"""{{{{Infobox town|name=Harbour|note={SENTENCE}}}}}
[[File:harbour.jpg|thumb|A picture of it. {SENTENCE}]]
'''Harbour''' ({{{{lang|xx|port}}}}) is a [[town|place]] that {SENTENCE[12:]}<ref>A book, page 3.</ref>

{{| class="wikitable"
| {SENTENCE}
|}}
* short item

== History ==
{OTHER} See <ref>never closed {OTHER}

{OTHER}

== See also ==
{SENTENCE.replace("harbour", "lighthouse")}

[[Category:Harbours]]
"""


AWAY = '<redirect title="x" />'


def dump(*pages: tuple[str, int, str, bool]) -> bytes:
    body = "".join(
        f"<page><title>{title}</title><ns>{space}</ns>{AWAY if redirect else ''}"
        f"<revision><text>{escape(text)}</text></revision></page>"
        for title, space, text, redirect in pages
    )
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{body}</mediawiki>'.encode()


def test_markup_is_left_out_and_sentences_stay():
    said = encyclopedia.prose(MARKUP)
    assert said.split("\n\n") == [f"Harbour is a place that {SENTENCE[12:]}", OTHER]


def test_an_article_is_read_in_whole_sections():
    section = f"== Part ==\n{SENTENCE}\n"
    long = f"{OTHER}\n" + section * (2 * encyclopedia.MOST_MARKUP // len(section))
    read = encyclopedia.first_sections(long)
    assert long.startswith(read) and read.endswith(section)
    assert encyclopedia.MOST_MARKUP - len(section) < len(read) <= encyclopedia.MOST_MARKUP
    whole = "x" * (2 * encyclopedia.MOST_MARKUP)
    assert encyclopedia.first_sections(whole) == whole


def test_redirects_talk_and_articles_without_prose_are_left_out(monkeypatch):
    pages = dump(
        ("Harbour", 0, MARKUP, False),
        ("Port", 0, f"#REDIRECT [[Harbour]] {SENTENCE}", True),
        ("Talk:Harbour", 1, SENTENCE, False),
        ("Empty", 0, "{{stub}}", False),
    )
    monkeypatch.setattr(encyclopedia, "read", lambda _: bz2.compress(pages))
    (article,) = encyclopedia.extract()
    described = encyclopedia.describe([article])
    assert article.title == "Harbour" and described["documents"] == 1 and "CC BY-SA" in described["licence"]
    assert described["bytes"] == len(article.text.encode())


def test_without_the_wheel_another_text_is_named(monkeypatch):
    def missing(_file):
        raise StorageError("the wheel gensim==4.4.0 cannot be had: no network")

    monkeypatch.setattr(encyclopedia, "read", missing)
    with refused(CorpusError, "corpus.no-wheel", "no network", "`licences`"):
        encyclopedia.extract()


@pytest.mark.full
def test_the_wheel_holds_a_hundred_articles():
    articles = encyclopedia.extract()
    assert len(articles) == 100 and encyclopedia.describe(articles)["bytes"] > 800_000
    assert {article.title for article in articles} >= {"Anarchism", "Albedo", "Aristotle"}

"""What a person may name - the title, a model's path, a text, a disclosure - changes the shape of no page."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from kvlab.output.format import table
from kvlab.output.markdown import cell, code
from kvlab_pipeline.report import findings, readme
from pipeline.report.example_metrics import build, verdict
from pipeline.report.shipped import shipped
from pipeline.report.test_html import Reader

EVIL = "A <script>alert(1)</script> | `b` ``c`` *d* [e](http://f) <!-- g\n# h\n```i\n</details> $j$ {{ k }}"
CUT = EVIL.replace("\n", "\N{REPLACEMENT CHARACTER}")
PLACES = ("title", "model", "corpus", "disclosure", "source", "calibrated")


def written(folder, wanted: dict[str, str]) -> tuple[str, str]:
    """FINDINGS.md and report.html where each place says this."""
    metrics = build()
    metrics["identity"] |= {name: wanted[name] for name in ("model", "corpus", "disclosure")}
    metrics["settings"] = (metrics.get("settings") or {}) | {
        "corpus": {"source": wanted["calibrated"], "other": wanted["source"]}
    }
    for entry in metrics.get("by_text") or []:
        entry["source"] = wanted["source"]
    out, page = folder / "FINDINGS.md", folder / "report.html"
    findings.write(shipped({"report": {"title": wanted["title"]}}), metrics, verdict(metrics), out, page)
    return out.read_text(), page.read_text()


def shape(text: str) -> list[tuple[str, str]]:
    """The kinds of all that a Markdown text is made of, tables and raw HTML among them."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    inner = [child for token in tokens for child in token.children or []]
    return [(token.type, token.tag) for token in (*tokens, *inner) if token.type not in ("text", "text_special")]


def test_a_page_has_the_same_shape_whatever_is_named(tmp_path):
    text, html = written(tmp_path, {place: f"plain {place}" for place in PLACES})
    evil, evil_html = written(tmp_path, {place: f"{EVIL} {place}" for place in PLACES})
    assert shape(text) == shape(evil)
    assert "<script>alert(1)" not in evil_html
    pages = [Reader(one) for one in (html, evil_html)]
    assert [tag for tag, _ in pages[0].elements] == [tag for tag, _ in pages[1].elements]
    assert [place for place in PLACES if f"{CUT} {place}" not in "".join(pages[1].words)] == []


def test_the_title_stands_as_it_was_given(tmp_path):
    text, html = written(tmp_path, dict.fromkeys(PLACES, "plain") | {"title": EVIL})
    assert text.startswith("# A &#60;script&#62;alert(1)") and text.count("\n# ") == 0
    assert re.search(r"<title>A &lt;script&gt;alert\(1\)", html)


def test_the_headline_has_the_same_shape_whatever_is_named(tmp_path):
    shapes = []
    for said in ("plain", EVIL):
        metrics = build()
        metrics["identity"] |= {"model": said, "corpus": said, "disclosure": said}
        headline = readme.select(metrics, verdict(metrics)) | {"figure_hash": None}
        shapes.append(shape(readme.block(headline)))
    assert shapes[0] == shapes[1] and ("code_inline", "code") in shapes[0]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("models/a-b_c", "`models/a-b_c`"),
        ("a`b", "``a`b``"),
        ("`a``b`", "``` `a``b` ```"),
        ("a\nb", "`a\N{REPLACEMENT CHARACTER}b`"),
        ("", "–"),
        (None, "–"),
    ],
)
def test_code_is_one_piece_of_code(given, wanted):
    assert code(given) == wanted
    inline = MarkdownIt("commonmark").parse(wanted)[1].children
    if given:
        assert [(token.type, token.content) for token in inline] == [
            ("code_inline", given.replace("\n", "\N{REPLACEMENT CHARACTER}"))
        ]


def test_words_and_code_stay_in_their_cells():
    text = table(["a", "b"], [[cell(EVIL), code(EVIL)], ["c", "d"]])
    rows = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    assert [token.type for token in rows].count("td_open") == 4
    assert not any(child.type == "html_inline" for token in rows for child in token.children or [])

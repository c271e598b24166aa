"""What a person may name - the title, a model's path, a text, a disclosure - changes the shape of no page."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from kvlab.output.format import table
from kvlab.output.markdown import cell, code
from kvlab_pipeline.rendering import svg
from kvlab_pipeline.report import findings, readme
from pipeline.report.example_metrics import build, verdict
from pipeline.report.shipped import shipped
from pipeline.report.test_html import PICTURE, Reader

EVIL = "A <script>alert(1)</script> | `b` ``c`` *d* [e](http://f) <!-- g\n# h\n```i\n</details> $j$ {{ k }}"
CUT = EVIL.replace("\n", "\N{REPLACEMENT CHARACTER}")
PLACES = ("title", "model", "corpus", "disclosure", "source", "calibrated")


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    undrawn(monkeypatch)


def undrawn(patch):
    patch.setattr(svg, "write", lambda _figure, path: path.write_text(PICTURE))
    patch.setattr(svg, "inline", lambda _figure, _name, _width: PICTURE)


def written(folder, said: str, **asked) -> tuple[str, str]:
    """FINDINGS.md and report.html where each of some places says this."""
    metrics = build()
    wanted = {name: said if name in asked else f"plain {name}" for name in PLACES}
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Both pages where every place says something harmless."""
    with pytest.MonkeyPatch.context() as patch:
        undrawn(patch)
        return written(tmp_path_factory.mktemp("plain"), "plain")


@pytest.mark.parametrize("place", PLACES)
def test_a_page_has_the_same_shape_whatever_is_named(tmp_path, place, plain):
    evil = written(tmp_path, EVIL, **{place: 1})
    assert shape(plain[0]) == shape(evil[0]) and plain[0] != evil[0]
    assert "<script>alert(1)" not in evil[1]
    pages = [Reader(html) for html in (plain[1], evil[1])]
    assert [tag for tag, _ in pages[0].elements] == [tag for tag, _ in pages[1].elements]
    assert CUT in "".join(pages[1].words)


def test_the_title_stands_as_it_was_given(tmp_path):
    text, html = written(tmp_path, EVIL, title=1)
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

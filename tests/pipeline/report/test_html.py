"""report.html: the words of FINDINGS.md, every drawn number within reach, and no network."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import embedded
from kvlab.core.errors import Fault
from kvlab.output import format as fmt
from kvlab_pipeline.rendering.figure import DARK, INK, PALE, PAPER
from kvlab_pipeline.rendering.html import body
from kvlab_pipeline.report import figures, findings, page
from pipeline.report.example_metrics import build, verdict
from pipeline.report.reading import estimates_in, tables_of
from refusals import refused

ROOT = Path(__file__).parents[3]
VOID = {"meta", "img", "br", "link", "input", "hr"}


def render(folder: Path, metrics: dict, judged: dict | None = None) -> tuple[str, str]:
    """FINDINGS.md and report.html of some metrics."""
    out, html = folder / "FINDINGS.md", folder / "report.html"
    findings.write(embedded.settings(), metrics, judged or verdict(metrics), out, html)
    return out.read_text(), html.read_text()


class Reader(HTMLParser):
    """What a page holds: elements with their attributes, and the words inside each kind of element."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.tables, self.scripts, self.words = [], [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append({"drawn": "figure" in self.open, "rows": []})
        if tag == "tr":
            self.tables[-1]["rows"].append([])
        if tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append("")
        if tag == "script":
            self.scripts.append({"attrs": dict(attrs), "text": ""})

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts[-1]["text"] += data
        elif "style" not in self.open:
            self.words.append(data)
            if {"td", "th"} & set(self.open):
                self.tables[-1]["rows"][-1][-1] += data

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.elements if name == tag]

    def said(self) -> dict[str, list[str]]:
        """What the marks of each figure say, in the order of the table."""
        found = {s["attrs"].get("id", ""): s["text"] for s in self.scripts}
        return {
            name.removeprefix("figure-").removesuffix("-words"): ["; ".join(words) for words in json.loads(text)]
            for name, text in found.items()
            if name.endswith("-words")
        }


# ------------------------------------------------------------------------ the same words and tables


def plain(cell: str) -> str:
    """Without Markdown's marks."""
    return re.sub(r"[`*]", "", cell).replace("\\|", "|").strip()


@pytest.mark.parametrize("engines", [("hf", "vllm"), ("hf",)])
def test_the_page_holds_every_table_of_the_findings(tmp_path, engines):
    text, html = render(tmp_path, build(engines=engines))
    tables = [[[cell.strip() for cell in row] for row in t["rows"]] for t in Reader(html).tables if not t["drawn"]]
    assert len(tables) > 15
    said = [[[plain(cell) for cell in row] for row in (head, *rows)] for head, _, *rows in tables_of(text)]
    assert tables == said


def test_the_page_says_every_word_of_the_findings_once(tmp_path):
    text, html = render(tmp_path, build())
    words = " ".join("".join(Reader(html).words).split())
    for line in text.splitlines():
        if line.startswith(("|", "!", "<", "`", "{", "}", " ")) or not line:
            continue
        line = re.sub(r"[`*]", "", line.lstrip("#- "))
        assert words.count(" ".join(line.split())) >= 1, line
    assert words.count("What to use") == 2  # the heading, and the list of contents


def test_every_recipe_is_folded_away(tmp_path):
    metrics = build()
    reader = Reader(render(tmp_path, metrics)[1])
    sections = sum(attrs.get("class") == "section" for attrs in reader.all("details"))
    assert len(reader.all("summary")) == 1 + sections + len(figures.FIGURES) + len(metrics["identity"]["recipes"])
    assert not any("<details>" in word for word in reader.words)


def test_the_report_folds_the_sections_that_the_findings_fold_and_none_is_open(tmp_path):
    text, html = render(tmp_path, build())
    folded = re.findall(r"^## (.+)\n\n<details><summary>", text, re.M)
    made = re.findall(r'<details class="section">\s*<summary>\s*<h2>(.+)</h2>', html)
    assert [unescape(title) for title in made] == folded and len(folded) > 10
    opened = {"id": "contents", "open": None}  # the list of sections, beside the page
    assert [attrs for attrs in Reader(html).all("details") if "open" in attrs] == [opened]


def test_one_title_and_a_link_to_every_section(tmp_path):
    text, html = render(tmp_path, build())
    reader = Reader(html)
    assert len(reader.all("h1")) == len(reader.all("main")) == len(reader.all("nav")) == 1
    targets = [attrs["href"] for attrs in reader.all("a") if attrs["href"].startswith("#")]
    ids = [attrs["id"] for _, attrs in reader.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in targets} <= set(ids)
    assert len(targets) == 1 + len(re.findall("^## ", text, re.M))


# ------------------------------------------------------------------------------------------ figures


def test_every_drawn_number_is_within_reach(tmp_path):
    metrics = build(unresolved=("protocol",))
    _, html = render(tmp_path, metrics)
    reader = Reader(html)
    drawn = reader.said()
    assert sorted(drawn) == sorted(figures.FIGURES)
    saved = {attrs["download"]: attrs["href"] for attrs in reader.all("a") if "download" in attrs}
    tables = iter([table["rows"] for table in reader.tables if table["drawn"]])
    for name in drawn:
        table = figures.FIGURES[name].table(metrics)
        words = drawn[name]
        assert len(words) == len(table)
        for line, spoken in zip(table.iter_rows(named=True), words, strict=True):
            assert fmt.estimate(line) in spoken
            assert f"{line['n_windows']} windows" in spoken
            assert line.get("cell_id", "") in spoken
        _, _, code = saved[f"{name}.csv"].partition(",")
        assert base64.b64decode(code).decode() == table.write_csv()
        header, *rows = next(tables)
        assert header == table.columns and len(rows) == len(table)
    exact = [float(attrs["value"]) for attrs in reader.all("data")]
    floats = [
        value
        for name in drawn
        for row in figures.FIGURES[name].table(metrics).iter_rows()
        for value in row
        if isinstance(value, float)
    ]
    assert exact == floats


@pytest.mark.parametrize("link", ["figures/unheard_of.svg", "https://example.org/a.svg", "figures/../a.svg"])
def test_a_picture_that_is_no_figure_is_refused(link):
    with pytest.raises(Fault):
        page.page(f"# T\n\n![a]({link})\n", build())


def test_a_figure_that_is_withheld_from_the_metrics_cannot_be_shown():
    with refused(Fault, "fault.unknown-figure", "noise"):
        page.page("# T\n\n![a](figures/noise.svg)\n", build() | {"noise": []})


# ------------------------------------------------------------------------- withheld, injected, fixed


def test_nothing_that_compares_engines_is_in_the_page_when_they_disagree(tmp_path):
    metrics = build()
    metrics["agreement"] |= {"state": "differ"}
    metrics["agreement_why"] = ["the identity cells differ"]
    text, html = render(tmp_path, metrics, verdict(metrics, allowed=False))
    reader = Reader(html)
    assert "gap_shapley" not in reader.said()
    assert {words.split(",")[0] for words in reader.said()["baseline"]} == {"hf"}
    assert "".join(reader.words).count("the identity cells differ") == text.count("the identity cells differ")
    hidden = [metrics["gap"], metrics["agreement"], metrics["sigma_drift"]]
    hidden += [row for row in metrics["baseline"] if row["engine"] == "vllm"]
    found = numbers_in(hidden)
    assert len(found) > 30
    assert not [number for number in found if repr(number) in html]
    spoken = json.dumps(reader.said(), ensure_ascii=False)
    for given in estimates_in(hidden):
        assert fmt.estimate(given) not in html and fmt.estimate(given) not in spoken


def numbers_in(data) -> list[float]:
    return [given[key] for given in estimates_in(data) for key in ("value", "low", "high")]


def test_words_of_the_metrics_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    metrics = build()
    clean = Reader(render(tmp_path, copy.deepcopy(metrics))[1])
    for cell in metrics["cells"]:
        cell["label"] = evil
    metrics["identity"]["model"] = f"{evil} <details><summary><code>x</code></summary>"
    reader = Reader(render(tmp_path, metrics)[1])
    assert [tag for tag, _ in reader.elements if tag in ("script", "img", "details")] == [
        tag for tag, _ in clean.elements if tag in ("script", "img", "details")
    ]
    assert evil in "".join(reader.words)  # it is shown as it is
    assert any(evil in words for words in reader.said()["cells"])  # as text: the script sets no markup


def test_the_policy_names_exactly_the_scripts_that_run_and_forbids_the_rest(tmp_path):
    reader = Reader(render(tmp_path, build())[1])
    (policy,) = [attrs["content"] for attrs in reader.all("meta") if attrs.get("http-equiv")]
    run = [s["text"] for s in reader.scripts if s["attrs"].get("type") != "application/json"]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" for code in run}
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert set(rules["script-src"].split()) == hashes and len(hashes) == 1
    assert rules["default-src"] == rules["connect-src"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "connect-src", "base-uri", "form-action"}


def test_no_attribute_leads_to_a_network(tmp_path):
    reader = Reader(render(tmp_path, build())[1])
    links = [attrs[key] for _, attrs in reader.elements for key in ("src", "href", "srcset", "action") if key in attrs]
    assert links and all(link.startswith(("#", "data:")) for link in links)


def test_numerals_are_not_typed_into_notes():
    metrics = build()
    for name, figure in figures.FIGURES.items():
        assert not re.search(r"(?<![A-Za-z_\d])\d", figures.described(name, figure.table(metrics)).note)
    for path in page.ASSETS.glob("*.j2"):
        prose = re.sub(r"{{.*?}}|{%.*?%}|<[^>]*>", "", path.read_text(), flags=re.S)
        assert not re.search(r"\d", prose)


# -------------------------------------------------------------------------------------------- folds


def bodied(text: str) -> tuple[Reader, tuple]:
    """The body of a text, and its sections."""
    found = body(text, lambda _name, _alt: "")
    return Reader(found.html), found.sections


FOLDED = """# T

## Front

first

## One

<details>
<summary>How &amp; why <code>x</code> <b>y</b> <img src=x></summary>

### Part

<details open><summary>Inner</summary>

word

</details>

</details>

## Two

short
"""


def test_a_folded_section_has_its_heading_in_its_summary_and_its_address_inside():
    reader, sections = bodied(FOLDED)
    assert sections == (("front", "Front"), ("one", "One"), ("two", "Two"))
    assert [tag for tag, _ in reader.elements] == [
        *("h1", "h2", "p"),
        *("details", "summary", "h2", "span", "code", "b", "div", "h3", "details", "summary", "p"),
        *("h2", "p"),
    ]
    assert reader.all("details") == [{"class": "section"}, {"open": None}]
    assert reader.all("div") == [{"id": "one"}] and [attrs.get("id") for attrs in reader.all("h2")][1] is None
    assert "How & why x y <img src=x>" in "".join(reader.words)


@pytest.mark.parametrize("given", ["<details><summary>a</summary>\n\nb\n", "<details>\n<summary>a</summary>\n"])
def test_a_fold_that_is_not_closed_is_refused(given):
    with refused(Fault, "fault.open-fold"):
        bodied(f"# T\n\n{given}")


def test_an_end_without_a_fold_is_shown():
    assert "</details>" in bodied("# T\n\n</details>\n")[0].words


# ------------------------------------------------------------------------------------------- colours


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_measured_as_wcag_does():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_marks_and_words_stand_out_in_both_themes():
    for paper, colours in ((PAPER, DARK.keys()), (DARK[PAPER], DARK.values())):
        for light, colour in zip(DARK, colours, strict=True):
            wanted = {INK: 4.5, PAPER: 1, PALE: 1}.get(light, 3)
            assert contrast(colour, paper) >= wanted, (colour, paper)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_the_page_s_words_stand_out_in_both_themes(theme):
    pairs = re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\);", page.asset("report.css"))
    colours = {name: pair[theme] for name, *pair in pairs}
    assert colours["paper"] == (PAPER, DARK[PAPER])[theme]
    for name in ("ink", "soft", "link", "focus"):
        assert contrast(colours[name], colours["paper"]) >= 4.5
        assert contrast(colours[name], colours["shade"]) >= 4.5


def test_every_colour_of_the_figures_is_in_the_page(tmp_path):
    html = render(tmp_path, build())[1]
    for light, dark in DARK.items():
        assert f"--c-{light[1:]}: light-dark({light}, {dark});" in html

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gate.test_check import CONTEXT, NOT_SHOWN, TIGHT, context, row, waiver
from kvlab.gate.catalogue.columns import TIERS
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.check import check
from kvlab.gate.render import to_json, to_junit, to_markdown
from kvlab.gate.rules import CRITERIA
from kvlab.output.markdown import cell
from tiers import examples

ROWS = [row("baseline"), row("fp8"), row("int", **NOT_SHOWN), row("preview"), row("mtp", draft_model_id=None)]
ROWS += [row("baseline", mechanism=..., row_id="old")]
READER = MarkdownIt("commonmark", {"html": True}).enable("table")


def reports():
    waived = context(waivers=(waiver(),))
    return {
        "mixed": check(ROWS, CONTEXT),
        "waived": check(ROWS, waived),
        "tight": check(ROWS, TIGHT),
        "none": check([], CONTEXT),
    }


def shape(markdown):
    """Structure of a document: its block tokens, and every inline token that is no text."""
    tokens = READER.parse(markdown)
    inline = [child.type for token in tokens for child in token.children or () if child.type != "text"]
    return [token.type for token in tokens], inline


def tables(markdown):
    """Cells of each line of each table, as a reader of Markdown sees them."""
    tokens = READER.parse(markdown)
    lines, inside = [], False
    for token in tokens:
        if token.type == "tr_open":
            lines.append([])
        inside = token.type in ("td_open", "th_open") or (inside and token.type == "inline")
        if inside and token.type == "inline":
            lines[-1].append("".join(child.content for child in token.children))
    return lines


@pytest.mark.parametrize("name", reports())
def test_json_is_whole_and_sorted(name):
    text = to_json(reports()[name])
    data = json.loads(text)
    assert text == json.dumps(data, indent=2, sort_keys=True) + "\n"
    assert set(data) == {
        "schema_version",
        "registry",
        "current",
        "strict",
        "verdict",
        "exit_code",
        "counts",
        "claims",
    } | {
        "alpha",
        "tested",
    }
    for claim in data["claims"]:
        assert claim["failed_criteria"] == [
            f["criterion"] for f in claim["findings"] if f["counts"] and not f["waiver"]
        ]


def test_markdown_says_everything():
    report = check(ROWS, context(waivers=(waiver(),)))
    text = to_markdown(report)
    assert text.startswith("# Gate\n\n**fail**: 6 rows, of which 3 pass, 1 waived, 1 fail, 1 not applicable.\n")
    cells = tables(text)
    tested = f"{report.tested} rows were tested: a row is certified only where its p-value, adjusted for their number"
    tested += " (Holm), is at most 0.025, and items that were drawn came out the same when they were measured again."
    assert (
        f"\n\nRegistry `{report.registry}`. {tested}\n\nHeld against what is current, `{report.current}`.\n\n| row |"
        in text
    )
    without = to_markdown(check(ROWS, replace(CONTEXT, current=None)))
    assert f"\n\nRegistry `{report.registry}`. {tested}\n\n| row |" in without
    assert ["mtp", "speculative_decoding requires draft fields", "draft_missing"] in [line[:3] for line in cells]
    assert ["int", waiver().criterion, "Ada", "2026-01-01", "measured next week"] in cells
    assert [line[0] for line in cells if line[0] in {c.name for c in CRITERIA}] == [c.name for c in CRITERIA]
    assert "\n\n\n" not in text and not any(line != line.rstrip() for line in text.splitlines())


def test_no_rows_are_said_to_be_none():
    text = to_markdown(check([], CONTEXT, strict=True))
    assert "**cannot judge**: 0 rows" in text and "Strict" in text and "| row |" not in text


# ------------------------------------------------------------------------- injection

HOSTILE = [
    "a|b|c",
    "a\\|b",
    "`|`",
    "<script>alert(1)</script>",
    "<!-- ",
    "&lt;b&gt; &#124;",
    "[text](javascript:alert(1))",
    "![image](http://example.org/x.png)",
    "<http://example.org>",
    "www.example.org",
    "**bold** __bold__ _it_ ~~gone~~",
    "$x$ @somebody #1 :tada:",
    "|---|---|",
    "line\n| x | y |\n\n# Heading",
    "carriage\r\nreturn\x00\x1b[31m\u2028\u202e",
    "\ud800",
    "{{ 7 * 7 }}{% if %}",
    "[x]",
    " [x]",
    "[^1]: note",
    "[name]: http://example.org",
    "![name][name] [name] [name][]",
    "[[page]] \\[text](a)",
    "]]><!DOCTYPE x [<!ENTITY y 'z'>]>",
    "\ufffe\x85\x7f",
]


def hostile_report(text):
    """The text wherever a row, its evidence or a waiver holds one."""
    given = row("int", model=text, engine=text, mechanism_variant=text, quality_eval_id=text, row_id=text, run=text)
    bad = replace(given, source=text)
    unread = Row({text: text, "context_tokens": text, "support_status": text}, ({text: text},), None, text)
    late = row("preview", quality_eval_status="completed", row_id="late", context_band=text, mechanism_notes=text)
    clean = row("int", **NOT_SHOWN)
    shown = context(waivers=(waiver().model_copy(update={"owner": text, "why": text}),))
    return check([bad, unread, late, clean], shown)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_breaks_the_tables(text):
    report = hostile_report(text)
    markdown = to_markdown(report)
    blocks, inline = shape(markdown)
    assert set(inline) <= {"code_inline", "strong_open", "strong_close"}  # the template's own
    assert set(blocks) <= {"paragraph_open", "paragraph_close", "inline", *HEADING, *TABLE}
    assert (
        blocks.count("heading_open") == len(SECTIONS)
        and [cell for cell in SECTIONS if f"# {cell}" not in markdown] == []
    )
    widths = [line.count("|") - 1 for line in markdown.splitlines() if "|" in line]
    reasons = sum(len(finding.reasons) for claim in report.claims for finding in claim.findings)
    sizes = {12: len(report.claims), 5: reasons + 1, 4: len(CRITERIA)}  # one waiver
    assert {width: widths.count(width) for width in set(widths)} == {
        12: sizes[12] + 2,
        7: sum(len(claim.judgements) for claim in report.claims) + 2,
        5: sizes[5] + 2 * 3,  # two headings of reasons, one of waivers
        4: sizes[4] + 2,
    }


HEADING = ("heading_open", "heading_close")
TABLE = [f"{part}_{end}" for part in ("table", "thead", "tbody", "tr", "th", "td") for end in ("open", "close")]
SECTIONS = ("Gate", "What fails", "What is waived", "Waivers in force", "Evidence", "Criteria")


@given(st.text(st.characters(codec=None), min_size=1, max_size=30))
@examples(60)
def test_no_text_at_all_breaks_a_cell(text):
    line = f"| a | b |\n|---|---|\n| {cell(text)} | end |\n\n| next |\n"
    assert [entry[1] for entry in tables(line)] == ["b", "end"]
    assert shape(line) == shape("| a | b |\n|---|---|\n| x | end |\n\n| next |\n")


@pytest.mark.parametrize(
    "text",
    [
        "fp8_e4m3",
        "kv_quantization+speculative_decoding",
        "0.05",
        "recipe: 4 bits",
        "3 x 4",
        "0.002039 [0.001999, 0.002076]",
        "[-1e-05, 0.3] of [0, 1]",
        "loses 0 [-0.3694, 0.3694], its margin is 0.05",
        "is ['hf', 'vllm']; allowed: [a, b]",
        "block_sparse:block=32,top_k=4",
        "supported+compression => quality_eval_status == completed",
        "a < b & c -> d",
        r"per-tensor\nscales",
    ],
)
def test_what_is_harmless_stays_readable(text):
    assert cell(text) == text


def test_a_reader_sees_the_text_as_it_was():
    for text in HOSTILE[:8]:
        line = f"| a | b |\n|---|---|\n| {cell(text)} | end |\n"
        assert tables(line)[1] == [text.strip(), "end"]
    assert cell(None) == cell("") == "–"


# ------------------------------------------------------------------------- JUnit


@pytest.mark.parametrize("name", reports())
def test_junit_has_a_test_for_each_row_and_criterion(name):
    report = reports()[name]
    root = ET.fromstring(to_junit(report))
    rows = [suite for suite in root if suite.get("name") != "kvlab.gate"]
    assert len(rows) == len(report.claims)
    for claim, suite in zip(report.claims, rows, strict=True):
        tests = suite.findall("testcase")
        assert [test.get("name") for test in tests] == [criterion.name for criterion in CRITERIA]
        failed = [test.get("name") for test in tests if test.find("failure") is not None]
        assert tuple(failed) == claim.failed_criteria
        assert (len(suite.findall("testcase/skipped")) > 0) == (claim.word in ("waived", "not_applicable"))
    for count, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(root.get(count)) == len(root.findall(f".//{tag}"))
        assert all(int(suite.get(count)) == len(suite.findall(f".//{tag}")) for suite in root)
    assert (root.find(".//error") is not None) == (report.verdict == "cannot_judge")


def test_junit_names_the_reason():
    failure = ET.fromstring(to_junit(check([row("mtp", draft_model_id=None)], CONTEXT))).find(".//failure")
    assert failure.get("type") == "draft_missing" and "draft_model_id is not given" in failure.get("message")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_breaks_the_xml(text):
    root = ET.fromstring(to_junit(hostile_report(text)).encode("utf-8"))
    assert len(root) == 4 and {len(suite.findall("testcase")) for suite in root} == {len(CRITERIA)}
    json.loads(to_json(hostile_report(text)))
    to_markdown(hostile_report(text)).encode("utf-8")


@pytest.mark.parametrize("tier", TIERS)
def test_what_a_row_is_short_of_is_a_note(tier):
    root = ET.fromstring(to_junit(check([row("preview", support_status=tier, **NOT_SHOWN)], CONTEXT)))
    notes, failures = root.findall(".//system-out"), root.findall(".//failure")
    short = tier in ("supported", "reviewed_preview", "too_lossy")  # without evidence a row earns `gated`
    assert len(notes) == (not short) and len(failures) == short

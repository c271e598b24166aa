"""A report as JSON, as GATE.md and as JUnit XML; what rows say cannot change the shape of any of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

from kvlab.gate.check import WORDS, Claim, Finding, GateReport
from kvlab.gate.evidence import ALPHA
from kvlab.gate.rules import CRITERIA, Criterion
from kvlab.output import format as fmt
from kvlab.output.markdown import render, words
from kvlab.output.terminal import printable

SUITE = "kvlab.gate"
TEMPLATE = Path(__file__).parent / "templates" / "gate.md.j2"


# ------------------------------------------------------------------------------------- JSON


def to_json(report: GateReport) -> str:
    """Sorted, indented JSON with a newline at its end; equal reports give equal bytes."""
    return json.dumps(report.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False) + "\n"


# --------------------------------------------------------------------------------- Markdown


def to_markdown(report: GateReport) -> str:
    """GATE.md: the verdict, a line for each row, every reason, the waivers, the evidence and the criteria."""
    claims = report.claims
    return render(
        TEMPLATE,
        report=report,
        counts=_counted(report),
        mechanism=_mechanism,
        waivers=[(claim, f) for claim in claims for f in claim.findings if f.waiver],
        judged=[(claim, judgement) for claim in claims for judgement in claim.judgements],
        criteria=CRITERIA,
        left=left,
        p_value=p_value,
    )


def _counted(report: GateReport) -> str:
    return ", ".join(f"{report.counts[word]} {words(word)}" for word in WORDS)


def _mechanism(claim: Claim) -> str:
    return "/".join(str(part) for part in (claim.row["mechanism"], claim.row["mechanism_variant"]) if part)


# ------------------------------------------------------------------------------------- JUnit


def to_junit(report: GateReport) -> str:
    """JUnit XML: a suite for each row, a test for each criterion.

    What keeps a row from its claim is a failure; what is waived, or was not judged, is skipped; what only keeps it
    from a better tier passes, with a note. A report that judged nothing is an error of its own.
    """
    root = ET.Element("testsuites", name=SUITE)
    for number, claim in enumerate(report.claims, 1):
        _suite(root, number, claim)
    if report.verdict == "cannot_judge":
        suite = _element(root, "testsuite", name=SUITE, tests="1", failures="0", errors="1", skipped="0")
        test = _element(suite, "testcase", classname=SUITE, name="some row was judged")
        _element(test, "error", message="no row was judged; nothing checked is not nothing wrong")
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, 0)) for suite in root)))
    ET.indent(root)
    # ASCII with character references reads the same under every encoding that a file is written in
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="us-ascii").decode() + "\n"


def _suite(root: ET.Element, number: int, claim: Claim) -> None:
    name = f"row {number}: {claim.row['row_id'] or claim.source or 'without an id'}"
    suite = _element(root, "testsuite", name=name, tests=str(len(CRITERIA)), errors="0")
    failed = {finding.criterion: finding for finding in claim.findings}
    for criterion in CRITERIA:
        _test(suite, name, criterion, claim, failed.get(criterion.name))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))


def _test(suite: ET.Element, row: str, criterion: Criterion, claim: Claim, finding: Finding | None) -> None:
    test = _element(suite, "testcase", classname=row, name=criterion.name)
    if claim.word == "not_applicable":
        _element(test, "skipped", message="declares no mechanism, and nothing lossy was observed")
    if finding is None:
        return
    said = "\n".join(map(str, finding.reasons))
    if not finding.counts:
        _element(test, "system-out").text = _legal(f"leaves {finding.ceiling} at most\n{said}")
    elif finding.waiver:
        waiver = finding.waiver
        _element(test, "skipped", message=f"waived by {waiver.owner} until {waiver.expires}: {waiver.why}")
    else:
        codes = ", ".join(dict.fromkeys(reason.code for reason in finding.reasons))
        _element(test, "failure", type=codes, message=said.split("\n")[0]).text = _legal(said)


def _element(parent: ET.Element, tag: str, **attributes: str) -> ET.Element:
    return ET.SubElement(parent, tag, {name: _legal(value) for name, value in attributes.items()})


def _legal(text: str) -> str:
    """Only characters that XML 1.0 has; lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def p_value(p: float | None) -> str:
    """A p-value, which is rounded up; not said how large above the level that certifies; a dash where none is."""
    if p is None:
        return fmt.DASH
    return f"≤\N{NO-BREAK SPACE}{p:.2g}" if p <= ALPHA else f"over\N{NO-BREAK SPACE}{ALPHA:g}"


def left(criterion: Criterion) -> str:
    """The tier that failing a criterion leaves, and those that some reasons leave instead."""
    return "; ".join([criterion.ceiling, *(f"{tier} where {code}" for code, tier in criterion.worse.items())])

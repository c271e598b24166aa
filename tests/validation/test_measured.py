"""Each measured table of docs is what its file renders, and no measured number stands outside of such a table."""

from __future__ import annotations

import json
import re

import pytest

from kvlab.core.errors import StorageError
from kvlab.output import format as fmt
from kvlab.stats import kl_scale
from refusals import refused
from validation import measured

RECORD = {
    "command": "kvlab measure DIR",
    "commit": "0123abc",
    "date": "2026-11-26",
    "model": "a model",
    "text": "a text",
}
RECORD |= {"headers": ["codec", "KL"], "rows": [["`klt` 2", [0.0123, 0.01, 0.015]], ["fp8", 0.5]]}
PAGE = "# Title\n\n<!-- measured/one:begin -->\n<!-- measured/one:end -->\n\nbelow\n"

RUN = {
    "snapshots.md": "tests/cli/test_snapshot_verbs.py",
    "eval.md": "tests/evals/test_eval.py",
    "gate.md": "tests/gate/test_gate_cli.py",
}
"""Pages whose consoles a test runs as they stand there."""
SETTINGS = {
    ("codecs.md", "| name | what it is | calibrated |"): "a version in a name",
    ("codecs.md", "| name | engine and option | bits per value | held against |"): "the bits of a format, by its rule",
    ("codecs.md", "| the vector | what is stored |"): "ranges of the stream's format",
    (
        "measure.md",
        "| less than | is called | what costs that | same top token there |",
    ): "llama.cpp's, as kvlab.stats.kl_scale has them",
    ("rivals.md", "| name | settings | source | what is not here |"): "settings of published codecs, by their papers",
    ("recommend.md", "| verdict | both ends are |"): "bounds of the rule, which a test holds against the code",
    ("recommend.md", "| | stdout | `answer` in `--json` | exit code |"): "exit codes",
    ("recommend.md", "| engine | K and V apart | layers apart | formats held against |"): "versions of engines",
    ("install.md", "| extra | adds | needed by |"): "versions of packages",
}
"""Tables with decimal numbers that nobody measured here."""
QUOTED = {
    "gate.md": {"KL of 0"},  # what a baseline's own KL is by definition
    "trust.md": {"KL at most 1e-6"},  # bounds of checks
    "rivals.md": {"0.01 nats", "KL is 0.0075", "KL is 0.059"},  # AQUA-KV's abstract; rows of the marked tables above
}
"""What looks like a measured number in running text, and is none, or repeats a marked table of the same page."""
BLOCK = re.compile(r"<!-- (measured/[\w-]+|seconds|surroundings):begin -->.*?<!-- \1:end -->", re.S)
NUMBER = re.compile(r"\d\.\d|\d ?%|\[[-+]?[\d.]+, [-+]?[\d.]+\]|\b\d{1,3},\d{3}\b")
ONE = r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
FIGURE = re.compile(rf"KL (?:of |is |at most )?{ONE}|{ONE} nats|\[{ONE}, {ONE}\]|95 % {ONE} to {ONE}")


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured/one.json").write_text(json.dumps(RECORD))
    (tmp_path / "page.md").write_text(PAGE)
    measured.update(tmp_path)
    return tmp_path


def test_a_block_is_made_of_its_file_and_says_where_it_comes_from(docs):
    text = (docs / "page.md").read_text()
    assert "| `klt` 2 | 0.0123 [0.0100, 0.0150] |\n| fp8 | 0.500 |" in text
    assert "kvlab 0123abc, 2026-11-26" in text and "```sh\nkvlab measure DIR\n```" in text
    assert text.startswith("# Title\n") and text.endswith("\nbelow\n")
    assert measured.problems(docs) == []


def test_a_second_update_changes_nothing(docs):
    text = (docs / "page.md").read_text()
    measured.update(docs)
    assert (docs / "page.md").read_text() == text


@pytest.mark.parametrize("what", ["number", "page", "no page", "no file"])
def test_whatever_differs_is_found(docs, what):
    page, file = docs / "page.md", docs / "measured/one.json"
    if what == "number":
        file.write_text(file.read_text().replace("0.0123", "0.0124"))
    elif what == "page":
        page.write_text(page.read_text().replace("0.0123", "0.0124"))
    elif what == "no page":
        page.unlink()
    else:
        file.unlink()
    assert len(measured.problems(docs)) == 1


def test_a_block_of_no_file_is_not_written(docs):
    (docs / "measured/one.json").unlink()
    with refused(StorageError, measured.NO_TABLE, "measured/one.json"):
        measured.update(docs)


def test_what_nothing_vouches_for_says_so(docs):
    file = docs / "measured/one.json"
    file.write_text(json.dumps(RECORD | {"untraced": "its output was not kept", "command": ""}))
    measured.update(docs)
    assert "older version (kvlab 0123abc, 2026-11-26), not measured again since" in (docs / "page.md").read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"command": ""},
        {"commit": "main"},
        {"rows": []},
        {"output": ["$ kvlab"]},
        {"command": "", "rows": [], "output": ["a line"]},
        {"rows": [["a", [1.0, 2.0]]]},
    ],
)
def test_a_file_without_its_origin_or_its_numbers_is_refused(docs, change):
    (docs / "measured/one.json").write_text(json.dumps(RECORD | change))
    with refused(StorageError, measured.NO_TABLE, "one.json"):
        measured.files(docs)


def test_the_committed_blocks_are_what_their_files_render():
    assert measured.problems() == []


def outside(text: str) -> str:
    """A page's text without its blocks and its code."""
    return re.sub(r"^ *```.*?^ *```", "", BLOCK.sub("", text), flags=re.M | re.S)


def tables(text: str) -> list[list[str]]:
    """The lines of each Markdown table."""
    return [found.strip().splitlines() for found in re.findall(r"(?:^ *\|.*\|\n)+", text, re.M)]


def typed() -> list:
    """Each page, with what of it stands outside of blocks and code."""
    return [pytest.param(page.name, outside(text), id=page.name) for page, text, _ in measured.pages()]


def columns(lines: list[str]) -> list[list[str]]:
    """The cells of a table's rows, by column."""
    return [list(cells) for cells in zip(*([cell.strip() for cell in line.split("|")] for line in lines), strict=False)]


def holds_numbers(cells: list[str]) -> bool:
    """Whether a column is of numbers, or a number in it looks measured."""
    return fmt.numeric(cells) or any(map(NUMBER.search, cells))


@pytest.mark.parametrize(("cell", "found"), [("12", True), ("klt, 2.0", True), ("3 %", True), ("two", False)])
def test_the_search_finds_a_number_in_a_table(cell, found):
    (table,) = tables(outside(f"text\n\n| codec |\n|---|\n| {cell} |\n\ntext\n"))
    assert any(map(holds_numbers, columns(table[2:]))) == found


@pytest.mark.parametrize("text", ["a KL of 0.3", "0.02 nats", "[0.1, 0.2]", "KL 1.2e-5", "95 % -0.1 to 0.2"])
def test_the_search_finds_a_cost_in_prose(text):
    assert FIGURE.findall(text) == [text.removeprefix("a ")]


@pytest.mark.parametrize(("page", "text"), typed())
def test_no_measured_number_is_typed_into_a_committed_table(page, text):
    """A table with a column of numbers, a decimal number, a share or an interval is a block, or no measurement."""
    loose = {lines[0].strip() for lines in tables(text) if any(map(holds_numbers, columns(lines[2:])))}
    assert loose == {header for name, header in SETTINGS if name == page}


@pytest.mark.parametrize(("page", "text"), typed())
def test_no_cost_is_typed_into_committed_prose(page, text):
    prose = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("|"))
    prose = re.sub(r"`[^`]*`", "", prose)
    assert {" ".join(found.split()) for found in FIGURE.findall(prose)} == set(QUOTED.get(page, ()))


def test_what_was_typed_and_printed_is_a_block_or_run_by_a_test(root):
    for page, text, _ in measured.pages():
        assert bool(re.search(r"^\$ ", BLOCK.sub("", text), re.M)) == (page.name in RUN), page.name
    assert all("the_example_of_the_documentation_runs" in (root / test).read_text() for test in RUN.values())


def test_the_scale_of_the_command_line_is_that_of_the_code(root):
    text = (root / "docs/measure.md").read_text()
    assert all(f"| {step.kl} | {step.word} | {step.like} |" in text for step in kl_scale.STEPS)


@pytest.mark.parametrize(
    ("name", "pages"),
    [
        ("gate-confirm", "confirm/gate/GATE-reasons.md"),
        ("studies-models", "models/gap/**/FINDINGS.md"),
        ("studies-gemma", "gemma/gap/FINDINGS.md"),
    ],
)
def test_tables_of_published_runs_repeat_their_pages(root, name, pages):
    """What a table of docs takes from a preset's run stands, digit for digit, on the pages of that run."""
    interval = re.compile(rf"{ONE} \[{ONE}, {ONE}\]")
    text = "".join(page.read_text() for page in (root / "docs/results").glob(pages))
    told = interval.findall(measured.block(measured.files(root / "docs")[f"measured/{name}"]))
    assert told and set(told) <= set(interval.findall(text))

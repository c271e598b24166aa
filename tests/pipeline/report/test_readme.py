"""The README's headline follows its committed numbers."""

from __future__ import annotations

import json
import re

import pytest

from kvlab.core.errors import NonFinite, StorageError
from kvlab_pipeline.report import figures, readme
from pipeline.report.example_metrics import build, verdict
from pipeline.report.test_certified import claims
from refusals import refused

TEXT = f"# Title\n\nabove\n\n{readme.BEGIN}\nold\n{readme.END}\n\nbelow\n"


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    return path


def updated(page, metrics=None, allowed=True, figure=None) -> str:
    metrics = metrics or build()
    readme.update(page, metrics, verdict(metrics, allowed=allowed), figure)
    return page.read_text()


def test_only_the_block_is_replaced(page):
    text = updated(page)
    assert text.startswith("# Title\n\nabove\n\n" + readme.BEGIN) and text.endswith(readme.END + "\n\nbelow\n")
    assert "\nold\n" not in text and "`variance_ratio` 0." in text and "(docs/headline.svg)" in text
    assert readme.check(page) == []


def test_a_second_update_changes_nothing(page):
    first = updated(page)
    assert updated(page) == first


def test_the_given_figure_is_copied(page, tmp_path):
    figures.write("gap_shapley", build(), tmp_path / "figures")
    picture = tmp_path / "figures/gap_shapley.svg"
    updated(page, figure=picture)
    assert (tmp_path / "docs/headline.svg").read_bytes() == picture.read_bytes()
    updated(page)
    assert (tmp_path / "docs/headline.svg").read_bytes() == picture.read_bytes()


@pytest.mark.parametrize("what", ["block", "numbers", "picture", "no picture"])
def test_check_finds_every_kind_of_drift(page, tmp_path, what):
    updated(page)
    if what == "block":
        page.write_text(page.read_text().replace("clear of zero", "clear of it", 1))
    elif what == "numbers":
        path = tmp_path / "docs/headline.json"
        numbers = json.loads(path.read_text())
        numbers["confidence"] = 0.5
        path.write_text(json.dumps(numbers))
    elif what == "picture":
        (tmp_path / "docs/headline.svg").write_text("<svg/>")
    else:
        (tmp_path / "docs/headline.svg").unlink()
    assert len(readme.check(page)) == 1


def test_disagreeing_engines_leave_neither_number_nor_picture(page, tmp_path):
    metrics = build()
    updated(page, metrics)
    text = updated(page, metrics, allowed=False)
    assert "**Withheld:**" in text and "| " not in text.replace("\\|", "") and "svg" not in text
    assert not (tmp_path / "docs/headline.svg").exists()
    share = metrics["gap"]["measures"]["kl"]["gap"]["value"]
    assert str(share) not in (tmp_path / "docs/headline.json").read_text()
    assert readme.check(page) == []


def test_one_engine_and_no_decomposition(page):
    assert "`protocol`" in updated(page, build(engines=("hf",)))
    assert "no factor decomposition" in updated(page, build(engines=("hf",)) | {"gap": None})
    assert readme.check(page) == []


@pytest.mark.parametrize("text", ["no markers\n", TEXT + TEXT, f"{readme.END}\n{readme.BEGIN}\n"])
def test_a_readme_without_one_place_for_it_is_refused(page, text):
    page.write_text(text)
    with refused(StorageError, "storage.no-markers", "headline:begin"):
        updated(page)
    assert page.read_text() == text and list(page.parent.iterdir()) == [page]


def test_a_missing_figure_and_missing_numbers_are_named(page, tmp_path):
    with refused(StorageError, None, "missing.svg"):
        updated(page, figure=tmp_path / "missing.svg")
    assert page.read_text() == TEXT
    with refused(StorageError, None, "headline.json"):
        readme.check(page)


def test_what_is_not_finite_is_refused(page):
    metrics = build()
    metrics["gap"]["measures"]["kl"]["gap"]["value"] = float("nan")
    with refused(NonFinite, None, "gap"):
        updated(page, metrics)
    assert page.read_text() == TEXT


def test_the_page_of_the_studies_has_its_blocks_brought_up_to_date(page, tmp_path):
    studies = tmp_path / readme.STUDIES_PAGE
    studies.parent.mkdir()
    studies.write_text("above\n{}\n{}\nbelow\n".format(*readme.marks("seconds")))
    page.write_text(page.read_text() + "{}\n{}\n".format(*readme.marks("codecs")))
    parts(page, tmp_path, more=())
    assert "| factorial of the gap, engines without a codec; float32 | 61 |" in studies.read_text()
    assert readme.check(page) == []
    studies.write_text(studies.read_text().replace("| 61 |", "| 16 |"))
    assert readme.check(page) == ["the seconds block of studies.md is not what docs/headline.json generates"]


def test_the_committed_readme_says_what_its_numbers_say(root):
    assert readme.check(root / "README.md") == []


INTERVAL = re.compile(r"[-.\d]+ \[[^]]+\]")


@pytest.mark.parametrize("name", ["headline", "codecs"])
def test_every_interval_of_the_committed_readme_stands_on_a_published_page(root, name):
    """README's numbers and the pages in `docs/results` are of one run."""
    _, block, _ = readme.split((root / "README.md").read_text(), root / "README.md", name)
    pages = "".join((root / "docs/results" / page).read_text() for page in ("gap/FINDINGS.md", "gate/GATE.md"))
    intervals = set(INTERVAL.findall(block))
    assert intervals and intervals <= set(INTERVAL.findall(pages.replace("\xa0", " ")))


def test_no_cost_is_typed_into_the_committed_readme(root):
    """Every KL, bit and second that a run found stands in a block that its numbers generate."""
    text = (root / "README.md").read_text()
    for name in ("headline", "codecs"):
        before, block, after = readme.split(text, root / "README.md", name)
        assert INTERVAL.search(block)
        text = before + after
    assert re.findall(r"KL (?:of )?[\d.]*\d|\d\.\d+ (?:bits|nats)|\d+ tok(?:ens)?/s|\[[\d.]+, [\d.]+\]", text) == []


def parts(page, tmp_path, more=tuple(readme.PARTS)) -> str:
    """A page with more blocks, brought up to date from rows and from two benchmarks."""
    text = "".join(f"\n{begin}\n{end}\n" for begin, end in map(readme.marks, more))
    page.write_text(page.read_text() + text)
    for job, seconds in (("measure/slug/float32", 61.25), ("measure/slug/hf-mechanisms", 119.0)):
        path = tmp_path / f"results/benchmarks/{job}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\th:m:s\n{seconds}\t0:00:00\n")
    metrics = build()
    metrics["identity"]["slug"] = "slug"
    told = claims("slug")
    told["answers"][0] |= {"protocol": "served", "stored_span": "window", "whole": False}
    told["rows"] = [row | {"protocol": "served", "stored_span": "window"} for row in told["rows"]]
    readme.update(page, metrics, verdict(metrics), None, None, told, tmp_path / "results/benchmarks")
    return page.read_text()


def test_tables_of_codecs_and_seconds_are_made_of_rows_and_benchmarks(page, tmp_path):
    text = parts(page, tmp_path)
    assert (
        "| transformers, few bits | `klt`, 4 bits | 4.19 in short windows | 0.00234 [0.00213, 0.00255] | 0.2470 ["
        in text
    )
    assert "Of 2 settings that this run tried 1 may be claimed as harmless" in text
    assert "| factorial of the gap, engines without a codec; float32 | 61 |" in text
    assert "All 2 jobs together take 3 minutes of one core" in text
    assert readme.check(page) == []


@pytest.mark.parametrize("part", list(readme.PARTS))
def test_a_number_changed_in_a_further_block_is_found(page, tmp_path, part):
    text = parts(page, tmp_path)
    before, block, after = readme.split(text, page, part)
    changed = block.replace("4.19", "4.09", 1) if part == "codecs" else block.replace("61", "16", 1)
    assert changed != block
    page.write_text(before + readme.marks(part)[0] + changed + readme.marks(part)[1] + after)
    assert readme.check(page) == [f"the {part} block of README.md is not what docs/headline.json generates"]


def test_the_table_of_seconds_needs_benchmarks(page, tmp_path):
    (tmp_path / "none").mkdir()
    with refused(StorageError, "storage.no-benchmarks", tmp_path / "none"):
        readme.update(page, build(), verdict(build()), None, None, None, tmp_path / "none")


TABLE = re.compile(r"(?m)(?:^\|.*\n)+")
SOURCE = re.compile(r"results/|python -m validation|python -c |`make |snakemake |`?kvlab [a-z]|FINDINGS|GATE|lm_eval")


def test_a_measured_table_of_the_documentation_says_how_it_was_made(root):
    """So that a reader can make it again; by its section or, of a page that one command wrote, by the page's head."""
    unnamed = []
    for path in sorted((root / "docs").glob("*.md")):
        head, *sections = re.split(r"(?m)^(?=## )", path.read_text())
        for section in [head, *sections]:
            measured = [table for table in TABLE.findall(section) if len(re.findall(r"\d\.\d", table)) > 3]
            if measured and not SOURCE.search(section) and "Written by" not in head:
                unnamed.append((path.name, section.splitlines()[0]))
    assert unnamed == []

"""The README's headline follows its committed numbers."""

from __future__ import annotations

import json

import pytest

from kvlab.base.errors import NonFinite, StorageError
from kvlab.report import figures, readme
from report.example_metrics import build, verdict

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
    assert "\nold\n" not in text and "| `variance_ratio` |" in text and "(docs/headline.svg)" in text
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
    with pytest.raises(StorageError, match="headline:begin"):
        updated(page)
    assert page.read_text() == text and list(page.parent.iterdir()) == [page]


def test_a_missing_figure_and_missing_numbers_are_named(page, tmp_path):
    with pytest.raises(StorageError, match=r"missing\.svg"):
        updated(page, figure=tmp_path / "missing.svg")
    assert page.read_text() == TEXT
    with pytest.raises(StorageError, match=r"headline\.json"):
        readme.check(page)


def test_what_is_not_finite_is_refused(page):
    metrics = build()
    metrics["gap"]["measures"]["kl"]["gap"]["value"] = float("nan")
    with pytest.raises(NonFinite, match="gap"):
        updated(page, metrics)
    assert page.read_text() == TEXT


def test_the_committed_readme_says_what_its_numbers_say(root):
    assert readme.check(root / "README.md") == []

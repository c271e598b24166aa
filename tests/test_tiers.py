"""Every test is in one tier, and every tier is run by a target."""

from __future__ import annotations

import ast
import re

import pytest

from tiers import FIRST, FULL, LATER, NEITHER, NIGHTLY, tier

TARGETS = {FIRST: "test", FULL: "test-rest", NIGHTLY: "test-nightly"}
OF_PYTEST = {"parametrize", "skipif", "skip", "xfail", "filterwarnings", "usefixtures", "timeout"}


@pytest.fixture(scope="module")
def selected(root) -> dict[str, str]:
    """The `-m` of each tier's target."""
    text = (root / "Makefile").read_text()
    recipe = r':.*\n\t@\$\(PYTEST\) -m "([^"]+)"'
    return {name: re.search(f"^{target}{recipe}", text, re.MULTILINE)[1] for name, target in TARGETS.items()}


def takes(expression: str, marks: set[str]) -> bool:
    """Whether pytest runs a test with these marks; what `-m` takes is Python, with a name true that is a mark."""
    names = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
    return eval(expression, {}, {name: name in marks for name in names})


@pytest.mark.parametrize("marks", [{FULL}, {NIGHTLY}, set()], ids=str)
@pytest.mark.parametrize("engine", [True, False])
def test_a_test_is_run_by_the_target_of_its_tier_and_by_no_other(selected, marks, engine):
    having = marks | ({"engine"} if engine else set())
    assert [name for name, expression in selected.items() if takes(expression, having)] == [tier(having)]


@pytest.mark.parametrize("marks", [{FULL}, set()], ids=str)
def test_a_property_has_all_its_examples_in_the_third_tier_too(selected, root, marks):
    having = marks | {"hypothesis"}
    assert {name for name, expression in selected.items() if takes(expression, having)} == {tier(having), NIGHTLY}
    profiles = re.findall(r"--hypothesis-profile=(\w+)", (root / "Makefile").read_text())
    assert profiles == [NIGHTLY]


def test_the_first_tier_leaves_out_files_whose_every_test_is_in_another(selected):
    assert selected[FIRST] == NEITHER
    assert LATER.search("import a\n\npytestmark = [pytest.mark.engine, pytest.mark.full]\n")
    assert LATER.search("pytestmark = pytest.mark.nightly\n")
    assert not LATER.search("pytestmark = pytest.mark.engine\n\n\n@pytest.mark.full\ndef test_one():\n    pass\n")


def test_two_tiers_are_none():
    with pytest.raises(ValueError, match="full and nightly"):
        tier({FULL, NIGHTLY, "engine"})


def test_every_mark_in_the_tests_is_a_known_one(root, pytestconfig):
    known = {line.partition(":")[0].partition("(")[0] for line in pytestconfig.getini("markers")} | OF_PYTEST
    assert {FULL, NIGHTLY, "engine"} <= known and "--strict-markers" in pytestconfig.getini("addopts")
    for path in (root / "tests").rglob("*.py"):
        used = set(re.findall(r"pytest\.mark\.(\w+)", path.read_text()))
        assert used <= known, path


def test_ci_runs_the_first_two_tiers_and_a_schedule_the_third(root):
    run = (root / ".ci/run").read_text()
    assert [word for word in ("make test ", "make test-rest ") if word in run] == ["make test ", "make test-rest "]
    assert "make test-nightly" in (root / ".github/workflows/nightly.yml").read_text()

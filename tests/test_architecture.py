"""The house: imports run downwards only, and the reporting wing never loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"

# Every folder stands on one floor; a module imports from its own folder and from lower floors, never upwards and
# never from another folder of its own floor.
FLOORS = {
    "base": 0,
    "stats": 1,
    "text": 1,
    "codec": 2,
    "pages": 2,
    "attention": 3,
    "engines": 3,
    "calibration": 4,
    "cache": 5,
    "witness": 5,
    "decoding": 6,
    "kvstore": 6,
    "lab": 7,
    "cluster": 8,
    "ledger": 8,
    "studies": 8,
    "gate": 9,
    "evals": 10,
    "serving": 10,
    "report": 10,
    "cli": 11,
    "validation": 12,
}
REPORTING = (
    *("kvlab.pages", "kvlab.gate", "kvlab.ledger", "kvlab.report", "validation.published", "kvlab.lab.plan"),
    *(f"kvlab.base.{name}" for name in ("paramfile", "params", "rungs", "recipe", "records", "errors")),
    *("kvlab.studies.kvstore_params", "kvlab.studies.settings"),
)
REPORTING_PARTS = (  # files of a study
    *("params", "plan", "schema", "numbers", "claims", "tables", "figure", "records"),
)
HEAVY = ("torch", "transformers", "vllm", "datasets")
TORCH_IN_STATS = "kvlab.stats.divergences"


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for root in (SRC / "kvlab", SRC.parent / "validation"):
        for path in sorted(root.rglob("*.py")):
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text())
    return found


@cache
def imported(tree: ast.Module) -> frozenset[str]:
    """Every module named in an import, inside functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def folder(name: str) -> str | None:
    """The folder of a module; None for the package's own two files, which may import anything."""
    parts = name.split(".")
    if parts[0] == "validation":
        return parts[0]
    return parts[1] if len(parts) > 2 or parts[-1] in FLOORS else None


def test_imports_run_downwards_only():
    known = modules()
    wrong = [
        f"{name} imports {target}"
        for name, tree in known.items()
        for target in imported(tree) & known.keys()
        if None not in (here := folder(name), there := folder(target))
        and here != there
        and FLOORS[there] >= FLOORS[here]
    ]
    assert wrong == []


def test_a_study_knows_no_other_study():
    known = modules()
    studies = {name.split(".")[2] for name in known if name.startswith("kvlab.studies.") and name.count(".") > 2}
    wrong = [
        f"{name} imports {target}"
        for name, tree in known.items()
        for target in imported(tree) & known.keys()
        if name.startswith("kvlab.studies.")
        and target.startswith("kvlab.studies.")
        and {(here := name.split(".")[2]), (there := target.split(".")[2])} <= studies
        and here != there
    ]
    assert wrong == []


def test_no_modules_import_one_another_in_a_circle():
    known = modules()
    named = {name: (imported(tree) & known.keys()) - {name} for name, tree in known.items()}
    # `from package import module` is no import of what else the package holds
    needed = {
        name: {n for n in found if not any(m.startswith(f"{n}.") for m in found)} for name, found in named.items()
    }
    TopologicalSorter(needed).prepare()  # a `CycleError` names the circle


def test_every_folder_has_a_floor_and_says_what_it_is():
    folders = [path for path in (SRC / "kvlab").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in folders} | {"validation"} == FLOORS.keys()
    packages = [path.parent for root in ("src/kvlab", "validation") for path in (SRC.parent / root).rglob("*.py")]
    untold = [path for path in set(packages) if not ast.get_docstring(ast.parse((path / "__init__.py").read_text()))]
    assert untold == []


def test_no_file_is_longer_than_a_reader_can_hold():
    roots = ("src/kvlab", "validation", "workflow")
    long = [p for root in roots for kind in ("*.py", "*.smk") for p in (SRC.parent / root).rglob(kind)]
    assert len(long) > 300
    assert [str(path) for path in long if len(path.read_text().splitlines()) >= 600] == []


def test_the_reporting_wing_names_no_heavy_package():
    wing = [name for name in modules() if name.startswith((*REPORTING, "kvlab.stats")) and name != TORCH_IN_STATS]
    wing += [n for n in modules() if n.startswith("kvlab.studies.") and n.split(".")[-1] in REPORTING_PARTS]
    assert len(wing) > 10
    heavy = {name: imported(tree) & set(HEAVY) for name, tree in modules().items() if name in wing}
    assert {name: found for name, found in heavy.items() if found} == {}


def test_reporting_really_runs_without_torch():
    program = (
        "import sys, kvlab.report.metrics, kvlab.report.comparison, kvlab.report.findings, kvlab.gate.verdict;"
        "import validation.published.main, kvlab.cli.main;"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": f"{SRC}:{SRC.parent}"}
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_params_load_nothing_that_takes_time():
    program = (
        "import sys, kvlab.cli.main, kvlab.cli.checked, kvlab.lab.plan;"
        "print(sorted({'torch', 'polars', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": f"{SRC}:{SRC.parent}"}
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_assert_is_for_tests():
    guilty = [name for name, tree in modules().items() if any(isinstance(node, ast.Assert) for node in ast.walk(tree))]
    assert guilty == []

"""The house: imports run downwards only, and the reporting wing never loads torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"

# The packages, lowest first: imports run from a package to those before it, never back.
PACKAGES = {
    "kvlab": SRC,
    "kvlab_mechanisms": SRC,
    "kvlab_pipeline": SRC,
    "validation": SRC.parent,
}
# Within a package every folder stands on one floor; a module imports from its own folder and from lower floors, never
# upwards and never from another folder of its own floor.
FLOORS = {
    "kvlab": {
        "core": 0,
        "stats": 1,
        "text": 1,
        "codecs": 2,
        "output": 2,
        "weights": 3,
        "advice": 3,
        "attention": 3,
        "engines": 3,
        "calibration": 4,
        "cache": 5,
        "witness": 5,
        "kvstore": 6,
        "measure": 7,
        "gate": 8,
        "evals": 9,
        "trials": 10,
        "cli": 11,
    },
    "kvlab_mechanisms": {
        "attention": 0,
        "decoding": 0,
        "memory": 0,
        "cluster": 1,
        "ledger": 1,
        "serving": 1,
        "cli": 2,
        "micro": 3,
    },
    "kvlab_pipeline": {"jobs": 0, "rendering": 0, "studies": 1, "gate_page": 2, "report": 3, "cli": 4},
    "validation": {},
}
REPORTING = (
    *("kvlab.gate", "kvlab_pipeline.jobs.plan", "kvlab.output", "kvlab_mechanisms.ledger", "validation.published"),
    *("kvlab_pipeline.gate_page", "kvlab_pipeline.rendering", "kvlab_pipeline.report"),
    *(f"kvlab.core.{name}" for name in ("paramfile", "params", "recipe", "records", "settings", "errors")),
    *("kvlab_pipeline.studies.kvstore_params", "kvlab_pipeline.studies.settings"),
)
REPORTING_PARTS = (  # files of a study
    *("chapter", "params", "plan", "schema", "numbers", "claims", "tables", "figure", "records"),
)
HEAVY = ("torch", "transformers", "vllm", "datasets")
TORCH_IN_STATS = "kvlab.stats.divergences"


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for package, root in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
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
    """The folder of a module in its package; None for a package's own files, which may import any of them."""
    package, *inner = name.split(".")
    return inner[0] if inner and inner[0] in FLOORS[package] else None


def upwards(name: str, target: str) -> bool:
    """Whether an import goes to a later package, or within one to a floor that is not lower."""
    own, other = (list(PACKAGES).index(one.partition(".")[0]) for one in (name, target))
    if own != other:
        return other > own
    floors, here, there = FLOORS[name.partition(".")[0]], folder(name), folder(target)
    return None not in (here, there) and here != there and floors[there] >= floors[here]


def test_imports_run_downwards_only():
    known = modules()
    wrong = [
        f"{name} imports {target}"
        for name, tree in known.items()
        for target in imported(tree) & known.keys()
        if upwards(name, target)
    ]
    assert wrong == []


def test_a_study_knows_no_other_study():
    known = modules()
    studies = {
        name.split(".")[2] for name in known if name.startswith("kvlab_pipeline.studies.") and name.count(".") > 2
    }
    wrong = [
        f"{name} imports {target}"
        for name, tree in known.items()
        for target in imported(tree) & known.keys()
        if name.startswith("kvlab_pipeline.studies.")
        and target.startswith("kvlab_pipeline.studies.")
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
    for package, floors in FLOORS.items():
        inside = (PACKAGES[package] / package).iterdir()
        found = {path.name for path in inside if path.is_dir() and path.name != "__pycache__"}
        assert found == floors.keys() or not floors, package
    folders = {path.parent for name, root in PACKAGES.items() for path in (root / name).rglob("*.py")}
    untold = [path for path in folders if not ast.get_docstring(ast.parse((path / "__init__.py").read_text()))]
    assert untold == []


def house() -> list[str]:
    """The table of docs/architecture.md: every folder with its floor and the first line of what it says of itself."""
    found = []
    for package, root in PACKAGES.items():
        inner = sorted(FLOORS[package].items(), key=lambda item: (item[1], item[0]))
        folders = [(package, ""), *((f"{package}/{name}", str(floor)) for name, floor in inner)]
        for folder, floor in folders:
            about = ast.get_docstring(ast.parse((root / folder / "__init__.py").read_text())).partition("\n")[0]
            name = f"**`{folder}/`**" if not floor else f"`{folder.partition('/')[2]}/`"
            found.append(f"| {name} | {floor} | {about.removesuffix('.')} |")
    return found


def test_the_documentation_says_where_everything_is():
    page = (SRC.parent / "docs/architecture.md").read_text()
    assert "\n".join(house()) in page, "\n".join(house())


def test_the_places_that_the_documentation_names_are_there():
    page = (SRC.parent / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:src|tests|workflow|validation)/[\w./]+)`", page)
    assert len(named) > 20 and [p for p in named if "NAME" not in p and not (SRC.parent / p).exists()] == []


def test_no_file_is_longer_than_a_reader_can_hold():
    roots = ("src", "validation", "workflow")
    long = [p for root in roots for kind in ("*.py", "*.smk") for p in (SRC.parent / root).rglob(kind)]
    assert len(long) > 300
    assert [str(path) for path in long if len(path.read_text().splitlines()) >= 600] == []


def test_the_reporting_wing_names_no_heavy_package():
    wing = [name for name in modules() if name.startswith((*REPORTING, "kvlab.stats")) and name != TORCH_IN_STATS]
    wing += [n for n in modules() if n.startswith("kvlab_pipeline.studies.") and n.split(".")[-1] in REPORTING_PARTS]
    assert len(wing) > 10
    heavy = {name: imported(tree) & set(HEAVY) for name, tree in modules().items() if name in wing}
    assert {name: found for name, found in heavy.items() if found} == {}


def test_reporting_really_runs_without_torch():
    program = (
        "import sys, kvlab_pipeline.report.metrics, kvlab_pipeline.report.comparison, kvlab_pipeline.report.findings;"
        "import kvlab_pipeline.report.verdict, validation.published.main, kvlab.cli.main;"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": f"{SRC}:{SRC.parent}"}
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_params_load_nothing_that_takes_time():
    program = (
        "import sys, kvlab.cli.main, kvlab.cli.checked, kvlab_pipeline.jobs.plan;"
        "print(sorted({'torch', 'polars', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": f"{SRC}:{SRC.parent}"}
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_assert_is_for_tests():
    guilty = [name for name, tree in modules().items() if any(isinstance(node, ast.Assert) for node in ast.walk(tree))]
    assert guilty == []


def test_a_class_name_means_one_thing():
    where: dict[str, list[str]] = {}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(SRC)))
    twice = {name: sorted(paths) for name, paths in where.items() if len(paths) > 1}
    own = twice.pop("Fit", [])  # what a codec fits by itself, by this name in each one's `codec.py`
    assert twice == {} and all(path.startswith("kvlab/codecs/") and path.endswith("/codec.py") for path in own), twice

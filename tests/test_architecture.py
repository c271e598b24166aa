"""The house: imports run downwards only, and the reporting wing never loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

SRC = Path(__file__).parent.parent / "src"

# A module may import from its own floor and from those below. Longest prefix wins.
FLOORS = {
    "kvlab.errors": 0,
    "kvlab.lifeline": 0.1,
    "kvlab.recipe": 0.1,
    "kvlab.paramfile": 0.1,
    "kvlab.layer_numbers": 0.1,
    "kvlab.ladder_names": 0.2,
    "kvlab.kvstore_params": 0.2,
    "kvlab.params": 0.2,
    "kvlab.per_model": 0.3,
    "kvlab.ladder": 0.2,
    "kvlab.records": 0.3,
    "kvlab.model": 0.4,
    "kvlab.corpus_docstrings": 0.5,
    "kvlab.corpus_licences": 0.5,
    "kvlab.corpus": 1,
    "kvlab.needles": 1,
    "kvlab.codec": 1,
    "kvlab.stats": 1,
    "kvlab.engines": 2,
    "kvlab.calibration": 2.1,
    "kvlab.reference": 2.1,
    "kvlab.experiments.plans": 0.4,
    "kvlab.experiments.plan": 0.5,
    "kvlab.experiments": 3,
    "kvlab.kvstore": 3.05,
    "kvlab.kvstore.studies": 4.1,
    "kvlab.kvstore.page": 4.2,
    "kvlab.gate": 3.1,
    "kvlab.gate.detection": 4.1,
    "kvlab.gate.page": 4.1,
    "kvlab.streams": 3.4,
    "kvlab.bench": 3.2,
    "kvlab.dropins": 3.3,
    "kvlab.evals": 3.5,
    "kvlab.report": 4,
    "kvlab.published": 4.1,
    "kvlab.planted": 4.3,
    "kvlab.bench.contest": 4.1,
    "kvlab.bench.divergence": 4.1,
    "kvlab.bench.figures": 4.1,
    "kvlab.bench.page": 4.2,
    "kvlab.bench.run": 4.3,
    "kvlab.flags": 0,
    "kvlab.tables": 0.1,
    "kvlab.verbs": 4.9,
    "kvlab.cli": 5,
    "kvlab.__main__": 6,
    "kvlab": 0,
}
REPORTING = (
    "kvlab.gate",
    "kvlab.report",
    "kvlab.published",
    "kvlab.paramfile",
    "kvlab.layer_numbers",
    "kvlab.kvstore_params",
    "kvlab.ladder_names",
    "kvlab.params",
    "kvlab.per_model",
    "kvlab.ladder",
    "kvlab.recipe",
    "kvlab.records",
    "kvlab.experiments.plan",
    "kvlab.experiments.plans",
)
HEAVY = ("torch", "transformers", "vllm", "datasets")
TORCH_IN_STATS = "kvlab.stats.divergences"


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted((SRC / "kvlab").rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def imported(tree: ast.Module) -> set[str]:
    """Every module named in an import, inside functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor(name: str) -> float:
    parts = name.split(".")
    return next(FLOORS[key] for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in FLOORS)


def test_imports_run_downwards_only():
    known = modules()
    upwards = [
        f"{name} imports {target}"
        for name, tree in known.items()
        for target in imported(tree)
        if target in known and target != "kvlab" and floor(target) > floor(name)
    ]
    assert upwards == []


def test_no_modules_import_one_another_in_a_circle():
    known = modules()
    named = {name: (imported(tree) & known.keys()) - {name} for name, tree in known.items()}
    # `from package import module` is no import of what else the package holds
    needed = {
        name: {n for n in found if not any(m.startswith(f"{n}.") for m in found)} for name, found in named.items()
    }
    TopologicalSorter(needed).prepare()  # a `CycleError` names the circle


def test_every_module_has_a_floor_of_its_own_choosing():
    assert [name for name in modules() if name.count(".") == 1 and name not in FLOORS] == []


def test_the_reporting_wing_names_no_heavy_package():
    wing = [name for name in modules() if name.startswith((*REPORTING, "kvlab.stats")) and name != TORCH_IN_STATS]
    assert len(wing) > 10
    heavy = {name: imported(tree) & set(HEAVY) for name, tree in modules().items() if name in wing}
    assert {name: found for name, found in heavy.items() if found} == {}


def test_reporting_really_runs_without_torch():
    program = (
        "import sys, kvlab.report.metrics, kvlab.report.comparison, kvlab.report.findings, kvlab.gate.verdict;"
        "import kvlab.published.main, kvlab.cli;"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_params_load_nothing_that_takes_time():
    program = (
        "import sys, kvlab.cli, kvlab.experiments.plan; print(sorted({'torch','polars','numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}
    )
    assert answer.stdout.strip() == "[]", answer.stderr


def test_assert_is_for_tests():
    guilty = [name for name, tree in modules().items() if any(isinstance(node, ast.Assert) for node in ast.walk(tree))]
    assert guilty == []

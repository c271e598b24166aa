"""One planted fault, in a process of its own: ``python -m validation.audit.trial WORKSPACE NAME``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from kvlab.base.errors import KvlabError
from validation.audit.files import FILES
from validation.audit.plant import Changes
from validation.audit.plants import PLANTS
from validation.audit.workspace import Workspace

NOTHING = "nothing"


def tried(workspace: Workspace, name: str) -> dict[str, str]:
    """What catches a fault: ``when`` (``job``, ``metrics``, ``page`` or `NOTHING`) and the words of the refusal."""
    with tempfile.TemporaryDirectory() as scratch:
        results = workspace.copy(Path(scratch) / "results")
        for when, step in steps(workspace, name, results):
            try:
                step()
            except KvlabError as error:
                return {"when": when, "caught": type(error).__name__, "words": " ".join(str(error).split())}
    return {"when": NOTHING, "caught": "", "words": ""}


def steps(workspace: Workspace, name: str, results: Path):
    """What follows a fault, one after the other, as the pipeline would run it."""
    if name in FILES:
        FILES[name](results)
        if not name_is_of_pages(results, workspace):
            yield "metrics", lambda: workspace.judge(results)
    else:
        yield "job", lambda: measured(workspace, name, results)
        yield "metrics", lambda: workspace.judge(results)
    yield "page", lambda: workspace.publish(results)


def name_is_of_pages(results: Path, workspace: Workspace) -> bool:
    """Whether what was spoilt is made of the tables: making it anew would mend it."""
    made = ("metrics.json", "verdict.json")
    return any((results / name).read_bytes() != (workspace.results / name).read_bytes() for name in made)


def measured(workspace: Workspace, name: str, results: Path) -> None:
    """The fault's job, measured with the fault in place."""
    from kvlab.studies.measuring import measure_jobs

    plant = PLANTS[name]
    with Changes() as changes:
        plant.apply(changes)
        measure_jobs(workspace.params, [plant.job], workspace.windows, workspace.fitted, results)


if __name__ == "__main__":
    print(json.dumps(tried(Workspace(Path(sys.argv[1])), sys.argv[2])))

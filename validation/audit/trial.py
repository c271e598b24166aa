"""One planted fault, in a process of its own: ``python -m validation.audit.trial WORKSPACE NAME``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from kvlab.core.errors import KvlabError
from validation.audit import engine, score, way
from validation.audit.files import PAGES, TABLES
from validation.audit.plant import Changes
from validation.audit.workspace import Workspace

PLANTS = way.PLANTS | engine.PLANTS | score.PLANTS
"""All faults of the running chain."""
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
    if name in PLANTS:
        yield "job", lambda: measured(workspace, name, results)
    else:
        (TABLES | PAGES)[name](results)
    if name not in PAGES:  # metrics and verdict made anew would mend what was done to them
        yield "metrics", lambda: workspace.judge(results)
    yield "page", lambda: workspace.publish(results)


def measured(workspace: Workspace, name: str, results: Path) -> None:
    """The fault's job, measured with the fault in place."""
    from kvlab_pipeline.studies.measuring import measure_jobs

    plant = PLANTS[name]
    with Changes() as changes:
        plant.apply(changes)
        measure_jobs(workspace.params, [plant.job], workspace.windows, workspace.fitted, results)


if __name__ == "__main__":
    print(json.dumps(tried(Workspace(Path(sys.argv[1])), sys.argv[2])))

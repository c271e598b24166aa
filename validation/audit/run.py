"""`make audit`: every fault in a process of its own, two at a time, and the page of what caught them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from kvlab.core.errors import Fault
from kvlab.core.records import write_json, write_text
from kvlab.output.rendering import environment, tidy
from validation.audit.files import PAGES, TABLES
from validation.audit.trial import NOTHING, PLANTS
from validation.audit.workspace import Workspace

TEMPLATES = Path(__file__).parent / "templates"
PROCESSES = 2
TIMEOUT = 300  # seconds; a trial takes ten, with vLLM thirty
ENDED = "ended without an answer"
WHEN = {
    "job": "the job that makes it",
    "metrics": "the reader of its files",
    "page": "the page",
    NOTHING: "**nothing**",
}


def audit(out: Path, names: list[str] | None = None) -> None:
    """Try every fault and write ``AUDIT.md`` and ``audit.json``.

    Parameters
    ----------
    out : Path
        AUDIT.md.
    names : list of str, optional
        These faults alone.

    Raises
    ------
    Fault
        A fault that has to be caught is not; the page is written all the same.
    """
    with TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        workspace.prepare()
        began = perf_counter()
        with ThreadPoolExecutor(PROCESSES) as pool:
            rows = list(pool.map(lambda name: trial(workspace, name), names or [*PLANTS, *TABLES, *PAGES]))
        seconds = perf_counter() - began
    write_json(out.with_suffix(".json"), {"rows": rows})
    write_text(out, page(rows, seconds))
    if silent := [row["name"] for row in rows if not row["caught"] and not row["beyond"]]:
        raise Fault(
            f"{len(silent)} of {len(rows)} planted faults reach the page, the first: {silent[0]}; see {out}",
            code="fault.reached-page",
        )


def trial(workspace: Workspace, name: str) -> dict:
    """One fault's row: its name, job, and what caught it."""
    plant = PLANTS.get(name)
    command = [sys.executable, "-m", "validation.audit.trial", str(workspace.folder), name]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    lines = ended.stdout.splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):  # an error of the plant's own is no refusal of the chain's
        said = (ended.stderr.strip().splitlines() or ["nothing said"])[-1]
        found = {"when": NOTHING, "caught": "", "words": f"{ENDED}: {said}"}
    where = plant.job if plant else "files"
    return {"name": name, "where": where, "beyond": plant.beyond if plant else ""} | found


def page(rows: list[dict], seconds: float) -> str:
    """AUDIT.md."""
    counts = {when: sum(row["when"] == when for row in rows) for when in WHEN}
    beyond = [row for row in rows if row["beyond"]]
    template = environment(TEMPLATES).get_template("audit.md.j2")
    return tidy(template.render(rows=rows, counts=counts, beyond=beyond, when=WHEN, minutes=seconds / 60))

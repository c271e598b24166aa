"""What a DVC stage is made from must not be edited while it runs.

DVC reads parameters and inputs again when a stage's command has ended, and records what it finds then. Whoever edits
params.yaml during a stage would get the new values recorded beside results of the old ones. So the Snakemake of a
stage fails if anything is other than when it started; DVC then records nothing. Code is named by records that the
stage `code` has written before: the code itself must be what they say, when a stage begins and when it ends. A
Snakemake that was started by hand records the parameters and the code that it began with itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

import closure
import yaml
from snakemake.common.configfile import load_configfile

PARAMS = "params.yaml"
MODEL = re.compile(r"\$\{models\[(\d+)\]\.path\}")  # how dvc.yaml names the folder of a model
CARD = "README.md"  # words about a model, which .dvcignore leaves out too
LARGE = 1 << 20  # bytes above which size and time stand for the content

seen = {}  # what the stage is made from, as this run has found it


def remember(config):
    """Keep what the running stage is made from: its parameters as this Snakemake has read them, and its files."""
    if "DVC_STAGE" in os.environ:
        seen.update(parameters(stage(), config), **files(stage(), config))
        stale = sorted(path for path, said in recorded(stage()).items() if seen.get(path) != said)
        if stale:
            fail(f"{', '.join(stale)}: the code is another one now; run: dvc repro {os.environ['DVC_STAGE']}")


def check():
    """Fail if anything of that is other now; one line names it."""
    if not seen:
        return
    closure.forget()
    config = load_configfile(PARAMS)
    now = parameters(stage(), config) | files(stage(), config)
    edited = sorted(name for name in seen.keys() | now.keys() if seen.get(name) != now.get(name))
    if edited:
        fail(f"edited while this stage ran: {', '.join(edited)}; type the same command again")


def fail(line):
    """End this run, so that DVC records nothing."""
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(1)


def stage():
    """The stage of dvc.yaml that runs."""
    return yaml.safe_load(Path("dvc.yaml").read_text())["stages"][os.environ["DVC_STAGE"]]


def parameters(entry, config):
    """The top-level entries of the parameters that a stage names, by their names."""
    return {f"{PARAMS}: {name}": config.get(name) for name in entry.get("params", [])}


def files(entry, config):
    """Fingerprints of the files that a stage depends on, of those of its models, and of its code.

    Folders of results are made here and nobody else's to change.
    """
    paths, code = [], recorded(entry)
    for name in entry.get("deps", []):
        model = MODEL.fullmatch(name)
        if model:
            folder = Path(config["models"][int(model[1])]["path"])
            paths += [path for path in folder.glob("*") if path.name != CARD]
        elif Path(name) in (*closure.FOLDERS, closure.RULES):
            paths += [path for path in Path(name).rglob("*") if path.suffix in closure.CODE]
        elif name not in code and not Path(name).is_dir():
            paths.append(Path(name))
    return {str(path): fingerprint(path) for path in paths} | {path: closure.record(Path(path)) for path in code}


def recorded(entry):
    """What the records of a stage's code say, by their paths."""
    paths = [Path(name) for name in entry.get("deps", []) if Path(name).parent == closure.RECORDS]
    return {str(path): path.read_text() if path.exists() else None for path in paths}


def fingerprint(path):
    """What is other when a file is."""
    if not path.exists():
        return None
    state = path.stat()
    return (
        (state.st_size, state.st_mtime_ns) if state.st_size > LARGE else hashlib.sha256(path.read_bytes()).hexdigest()
    )

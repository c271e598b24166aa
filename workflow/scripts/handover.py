"""Hand results from one tool to the other: what Snakemake made to DVC, what DVC restored to Snakemake.

    python workflow/scripts/handover.py adopt [STAGE...]   records what `snakemake` made; `dvc repro` then runs nothing
    python workflow/scripts/handover.py pull [STAGE...]    restores what DVC records; `snakemake` then runs nothing

Neither runs a job. Both tools believe what they are told here: `dvc commit -f` records any file that is there,
`snakemake --touch` calls any file made with the parameters of now. So everything is checked first, and one
doubt ends the handover before anything is recorded. docs/two-tools.md says what is refused, and why.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from dvc_sync import DVC_YAML, declared_outs, owner
from ruamel.yaml import YAML

BIN = Path(sys.executable).parent
LOCK = Path("dvc.lock")
PULLED = Path(".snakemake/pulled.json")  # files that `pull` touched, with the end that Snakemake then recorded
STAMP = ".snakemake_timestamp"  # Snakemake keeps the time of a folder in it
TRIGGERS = ("code", "input", "mtime", "params", "software-env")  # also where a profile wants fewer
# A job may open its log just before Snakemake notes its start; Snakemake itself takes longer than this to start.
SLACK = 0.5  # seconds
GONE = {"deleted", "not in cache"}  # what DVC says of an out that only has to be fetched


class Refusal(Exception):
    """The handover would record something that is not known to be right; the message is one line."""


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml: its outs, and the stages that it reads."""

    name: str
    outs: tuple[str, ...]
    upstream: tuple[str, ...]


@dataclass(frozen=True)
class Made:
    """A file or folder that a job of the plan makes, as `snakemake --summary` lists it."""

    path: str
    rule: str
    status: str
    pending: bool


# Both tools, seen from outside


def run(tool, *arguments):
    """Run a tool of this environment and keep what it says."""
    return subprocess.run([BIN / tool, *arguments], capture_output=True, text=True)


def complaint(done):
    """What a failed command said, in one line: DVC's paragraph, or the last line."""
    said = done.stdout + done.stderr
    _, error, paragraph = said.partition("ERROR: ")
    if error:
        return " ".join(paragraph.partition("\n\n")[0].split())
    return said.strip().rpartition("\n")[2].strip().removeprefix("error: ") or f"exit code {done.returncode}"


def read_stages():
    """The stages of dvc.yaml by name, each after the stages that it reads."""
    if not DVC_YAML.exists():
        raise Refusal(f"there is no {DVC_YAML} here; go to the root of the repository")
    entries = YAML(typ="safe").load(DVC_YAML.read_text())["stages"]
    outs = {name: declared_outs(entry) for name, entry in entries.items()}
    upstream = {
        name: sorted({found[0] for dep in entry.get("deps", []) if (found := owner(dep, outs))})
        for name, entry in entries.items()
    }
    order = TopologicalSorter(upstream).static_order()
    return {name: Stage(name, tuple(outs[name]), tuple(upstream[name])) for name in order}


def named(names, stages):
    """The stages that were named; an unknown one is refused with the nearest."""
    for name in names:
        if name not in stages:
            near = difflib.get_close_matches(name, stages, 1, 0) or [""]
            raise Refusal(f"{name!r} is no stage of {DVC_YAML}; did you mean {near[0]!r}?")
    return [stages[name] for name in stages if name in names]


def dvc_status():
    """What is not as dvc.lock records it: {stage: {kind of change: {path: change}}}."""
    done = run("dvc", "status", "--json")
    if done.returncode:
        raise Refusal(f"dvc status: {complaint(done)}")
    changes = {}
    for stage, entries in json.loads(done.stdout).items():
        kinds = [{entry: {}} if isinstance(entry, str) else entry for entry in entries]
        changes[stage] = {kind: paths for entry in kinds for kind, paths in entry.items()}
    return changes


def plan(stages):
    """What the jobs of these stages make, and whether Snakemake would make it again; runs nothing."""
    triggers = ["--rerun-incomplete", "--rerun-triggers", *TRIGGERS]
    done = run("snakemake", "--summary", *triggers, "--", *(stage.name for stage in stages))
    if done.returncode:
        raise Refusal(f"snakemake has no plan: {complaint(done)}")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    start = next(number for number, line in enumerate(lines) if line[0] == "output_file")
    rows = [dict(zip(lines[start], line, strict=True)) for line in lines[start + 1 :]]
    return [Made(row["output_file"], row["rule"], row["status"], row["plan"] != "no update") for row in rows]


def of_stage(stage, made):
    """Those that a stage declares."""
    return [one for one in made if owner(one.path, {stage.name: stage.outs})]


def shown(paths):
    """The first of some paths, and how many more there are."""
    first, *others = sorted(paths)
    return f"{first} (and {len(others)} more)" if others else first


# Snakemake's records: what is known of how a file was made


class Records:
    """Snakemake's metadata of this folder."""

    def __init__(self):
        from snakemake.io import IOFile
        from snakemake.persistence.file import FilePersistence

        self.store, self.file = FilePersistence(), IOFile

    def of(self, path):
        """The record of a file, or None."""
        return self.store.metadata(self.file(path))

    def incomplete(self, paths):
        """Those whose job began and did not end; what is public of this takes jobs."""
        return self.store._filter_incomplete_keys(paths)


def doubt(path, record, pulled):
    """Why a file may not be what its record tells of; None when there is no doubt."""
    if record is None:
        return "Snakemake has no record of it, as after a copy by hand"
    began = 0.0
    if pulled.get(path) != record.endtime:
        if not any(modified(Path(log)) >= record.starttime - SLACK for log in record.log or []):
            return "it was touched, not made: its log is missing or older than its record"
        began = record.starttime - SLACK
    if modified(stamped(path)) != record.endtime or not all(began <= time <= record.endtime for time in inside(path)):
        return "it was changed after Snakemake recorded it"
    for file, checksum in (record.input_checksums or {}).items():
        if checksum != digest(file):
            return f"it was made from another {file}"
    return None


def stamped(path):
    """The file whose time Snakemake takes for that of a file or folder."""
    return Path(path, STAMP) if Path(path).is_dir() else Path(path)


def inside(path):
    """Times of a folder and of everything in it; none for a file."""
    if not Path(path).is_dir():
        return []
    return [modified(entry) for entry in (Path(path), *Path(path).rglob("*"))]


def modified(path):
    """When a file was last written; never, if it is not there."""
    return path.stat().st_mtime if path.exists() else -1.0


@cache
def digest(path):
    """sha256 of a file as Snakemake writes it; None if it is not there."""
    if not Path(path).is_file():
        return None
    with open(path, "rb") as stream:
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


def read_pulled():
    """Files that `pull` touched, by path: touched since DVC vouched for them, and so as good as made."""
    return json.loads(PULLED.read_text()) if PULLED.exists() else {}


def note_pulled(made, records):
    """Remember which records are those of `pull`; any later touch writes another end."""
    ends = read_pulled() | {one.path: records.of(one.path).endtime for one in made}
    draft = PULLED.with_name(f".{PULLED.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(ends, indent=1, sort_keys=True))
    draft.replace(PULLED)


# adopt: Snakemake -> DVC


def adopt(names):
    """Record in DVC what Snakemake made; returns a line for each stage."""
    stages, status = read_stages(), dvc_status()
    wanted = named(names or stages, stages)
    changed = [stage for stage in wanted if stage.name in status]
    made = plan(changed) if changed else []
    left = {} if names else {stage.name: why for stage in changed if (why := untouched(stage, status, made))}
    taken = [stage for stage in changed if stage.name not in left]
    if taken:
        check_adoptable(taken, stages, status, made)
        commit(taken)
    fates = {stage.name: "recorded" for stage in taken} | left
    return {stage.name: fates.get(stage.name, "up to date") for stage in wanted}


def untouched(stage, status, made):
    """Why an unnamed stage is left alone: no job has made anything of it since DVC's record."""
    outs = status[stage.name].get("changed outs", {})
    if not any(Path(out).exists() for out in stage.outs):
        return "left: not made"
    if not outs and any(one.pending for one in of_stage(stage, made)):
        return "left: as recorded earlier, and Snakemake would make it again"
    return None


def check_adoptable(taken, stages, status, made):
    """Refuse all if one file of one stage is not known to be what Snakemake would make now."""
    records, pulled = Records(), read_pulled()
    for stage in taken:
        own = of_stage(stage, made)
        check_done(stage, made, [one for one in stages.values() if one.name not in status])
        check_upstream(stage, taken, status)
        check_complete(stage, own, records)
        check_made(stage, own, records, pulled)
        check_strays(stage, own)


def check_done(stage, made, unchanged):
    """Refuse while Snakemake would make something again: also what `--config` made, whose parameters differ.

    Where it would remake even what DVC calls unchanged, DVC has restored that and Snakemake is to be told first.
    """
    pending = [one for one in made if one.pending]
    if not of_stage(stage, pending):
        return
    restored = [one for one in unchanged if of_stage(one, pending)]
    first = restored[0] if restored else stage
    again = min(of_stage(first, pending), key=lambda one: (one.status == "ok", one.path))
    reason = "what it is made from would be made again" if again.status == "ok" else again.status
    mend = f"DVC restored it, so run: {make('pull', restored)}" if restored else f"run: snakemake -- {stage.name}"
    raise Refusal(f"{first.name}: Snakemake would make {again.path} again ({reason}); {mend}")


def check_upstream(stage, taken, status):
    """Refuse a stage that reads one which DVC would make again."""
    names = [one.name for one in taken]
    for above in stage.upstream:
        if above in status and above not in names:
            mend = f"run: make adopt STAGE='{' '.join([above, *names])}'"
            raise Refusal(f"{stage.name}: it reads {above}, which DVC does not know as it is now; {mend}")


def check_complete(stage, own, records):
    """Refuse what a killed job left."""
    broken = records.incomplete([one.path for one in own])
    if broken:
        raise Refusal(f"{stage.name}: the job of {shown(broken)} did not end; run: snakemake -- {stage.name}")


def check_made(stage, own, records, pulled):
    """Refuse files of which it is not known that a job made them, as they are, from what is there."""
    doubts = {one: why for one in own if (why := doubt(one.path, records.of(one.path), pulled))}
    if not doubts:
        return
    first = min(doubts, key=lambda one: one.path)
    again = {first.path} if len(doubts) == 1 else {one.rule for one in doubts}
    mend = f"run: snakemake --forcerun {shlex.join(sorted(again))} -- {stage.name}"
    raise Refusal(f"{stage.name}: {shown(one.path for one in doubts)}: {doubts[first]}; {mend}")


def check_strays(stage, own):
    """Refuse files that no job makes: DVC records folders whole, with what older parameters left there."""
    known = {Path(one.path) for one in own}
    files = [path for out in stage.outs for path in Path(out).rglob("*") if not path.is_dir()]
    loose = [str(path) for path in files if not known & {path, *path.parents}]
    ignored = run("dvc", "check-ignore", *loose).stdout.splitlines() if loose else []
    strays = sorted(set(loose) - set(ignored))
    if strays:
        kept = {folder for path in [*known, *map(Path, stage.outs)] for folder in path.parents}
        whole = sorted({largest(Path(path), kept) for path in strays})
        raise Refusal(f"{stage.name}: no job makes {shown(strays)}; run: rm -r {shlex.join(whole)}")


def largest(path, kept):
    """The outermost folder around a file that holds nothing to keep, or the file itself."""
    return next(str(part) for part in [*reversed(path.parents), path] if part not in kept)


def commit(taken):
    """Let DVC record stages as they are."""
    done = run("dvc", "commit", "--force", *(stage.name for stage in taken))
    if done.returncode:
        raise Refusal(f"dvc commit: {complaint(done)}")


# pull: DVC -> Snakemake


def pull(names):
    """Restore what DVC records and make it known to Snakemake; returns a line for each stage."""
    stages, status = read_stages(), dvc_status()
    recorded = YAML(typ="safe").load(LOCK.read_text())["stages"] if LOCK.exists() else {}
    wanted = named(names or [name for name in stages if name in recorded], stages)
    needed = with_upstream(wanted, stages)
    for stage in needed:
        if stage.name not in recorded:
            raise Refusal(f"{stage.name}: {LOCK} has no record of it; run: dvc repro {stage.name}")
    check_clean(needed, status)
    missing = [stage for stage in needed if stage.name in status]
    if missing:
        said = fetch(missing)
        check_clean(needed, dvc_status(), said)
    if needed:
        touch(needed)
    fates = {stage.name: "known to Snakemake" for stage in needed}
    fates |= {stage.name: "restored and known to Snakemake" for stage in missing}
    return fates | {name: "left: no record" for name in stages if not names and name not in recorded}


def with_upstream(wanted, stages):
    """Stages and all that they are made from, each after what it reads."""
    todo, found = [stage.name for stage in wanted], set()
    while todo:
        name = todo.pop()
        found.add(name)
        todo += set(stages[name].upstream) - found
    return [stages[name] for name in stages if name in found]


def check_clean(needed, status, fetched=None):
    """Refuse what is not as DVC records it; what is only missing passes as long as nothing was `fetched`."""
    for stage in needed:
        changes = status.get(stage.name, {})
        for out, change in changes.get("changed outs", {}).items():
            if change not in GONE:
                mend = f"run: dvc checkout {stage.name}, which brings the record back, or {make('adopt', [stage])}"
                raise Refusal(f"{stage.name}: {out} is not what {LOCK} records ({change}); {mend}")
            if fetched is not None:
                raise Refusal(f"{stage.name}: DVC cannot restore {out} ({fetched}); run: dvc repro {stage.name}")
        theirs = {out: out for above in stage.upstream for out in outs_of(needed, above)}
        deps = changes.get("changed deps", {})
        changed = {path: what for path, what in deps.items() if not (path in theirs and what in GONE)}
        if changed or "changed command" in changes:
            what = "; ".join(f"{path}: {words(change)}" for path, change in changed.items()) or "its command"
            mend = f"run: {make('adopt', [stage])} if Snakemake made it so, else dvc repro {stage.name}"
            raise Refusal(f"{stage.name}: {LOCK} is of another state ({what}); {mend}")


def outs_of(stages, name):
    """The outs of a stage among some."""
    return next((stage.outs for stage in stages if stage.name == name), ())


def words(change):
    """What DVC says of a dependency: one word, or one for each parameter."""
    return change if isinstance(change, str) else ", ".join(f"{key} {word}" for key, word in change.items())


def fetch(missing):
    """Restore outs from the cache, and what is not there from the remote; returns what DVC complains of."""
    names = [stage.name for stage in missing]
    done = run("dvc", "checkout", *names)
    if done.returncode and run("dvc", "remote", "list").stdout.strip():
        done = run("dvc", "pull", *names)
    return complaint(done) if done.returncode else ""


def touch(needed):
    """Let Snakemake record stages as made now, and see that it has nothing to do for them."""
    done = run("snakemake", "--touch", "--forceall", "--quiet", "all", "--", *(stage.name for stage in needed))
    if done.returncode:
        raise Refusal(f"snakemake --touch: {complaint(done)}")
    made = plan(needed)
    again = [one.path for one in made if one.pending]
    if again:
        raise Refusal(f"Snakemake would still make {shown(again)}; the rules and {DVC_YAML} differ; run: make sync")
    note_pulled(made, Records())


def make(verb, stages):
    """The command that a person types."""
    return f"make {verb} STAGE='{' '.join(stage.name for stage in stages)}'"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("verb", choices=["adopt", "pull"])
    arguments.add_argument("stages", nargs="*", metavar="STAGE", help="default: all")
    given = arguments.parse_args()
    try:
        fates = {"adopt": adopt, "pull": pull}[given.verb](given.stages)
    except Refusal as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    for name, fate in fates.items():
        print(f"{name:<{max(map(len, fates))}}  {fate}")
    print(summary(given.verb, list(fates.values())))


def summary(verb, fates):
    """How many stages went which way, and what follows."""
    counts = Counter(fate.partition(":")[0] for fate in fates)
    text = ", ".join(f"{count} {fate}" for fate, count in counts.items()) or "no stage"
    if verb == "pull":
        return f"{text}; snakemake has nothing to do for what is known to it"
    return f"{text}; commit {LOCK} to git" if "recorded" in counts else text


if __name__ == "__main__":
    main()

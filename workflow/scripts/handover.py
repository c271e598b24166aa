"""Hand results from one tool to the other: what Snakemake made to DVC, what DVC restored to Snakemake.

    python workflow/scripts/handover.py adopt [STAGE...]   records what `snakemake` made; `dvc repro` then runs nothing
    python workflow/scripts/handover.py pull [STAGE...]    restores what DVC records; `snakemake` then runs nothing

Neither runs a job. `adopt` is `dvc commit --force`; `pull` is `dvc checkout` or `dvc pull`, then `snakemake --touch`.
Both tools believe what they are told here: the first records any file that is there, the last calls any file made with
the parameters of now. So everything is checked before, and one doubt ends the handover before anything is recorded.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from graphlib import TopologicalSorter
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc_sync import DVC_YAML, make_folders, outs_of, owner
from job_records import Records, doubt, note_pulled, read_pulled
from ruamel.yaml import YAML

BIN, LOCK = Path(sys.executable).parent, Path("dvc.lock")
TRIGGERS = ("code", "input", "mtime", "params", "software-env")  # also where a profile wants fewer
ABSENT = ("deleted", "not in cache")  # what DVC says of an out that only has to be fetched
ONE_BY_ONE = """
import json, sys
from snakemake.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        if stop.code:
            raise
"""


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
    """A file or folder that a job makes, as `snakemake --summary` lists it."""

    path: str
    rule: str
    status: str
    pending: bool


# adopt: Snakemake -> DVC


def adopt(names):
    """Record in DVC what Snakemake made; returns what became of each stage."""
    stages, status = read_stages(), dvc_status()
    wanted = named(names or stages, stages)
    changed = [stage for stage in wanted if stage.name in status]
    made = plan(changed) if changed else []
    fates = {stage.name: "up to date" for stage in wanted}
    for stage in changed:
        left = None if names else untouched(stage, status[stage.name], of_stage(stage, made))
        fates[stage.name] = f"left: {left}" if left else "recorded"
    taken = [stage for stage in changed if fates[stage.name] == "recorded"]
    check_adoptable(taken, status, made)
    if taken:
        for stage in taken:
            make_folders(stage.outs)
        tell("dvc", "commit", "--force", *(stage.name for stage in taken))
    return fates


def untouched(stage, changes, own):
    """Why a stage that nobody named is left alone: no job has made anything of it since DVC's record."""
    if not any(Path(out).exists() for out in stage.outs):
        return "not made"
    if "changed outs" not in changes and any(one.pending for one in own):
        return "as recorded earlier, and Snakemake would make it again"
    return None


def check_adoptable(taken, status, made):
    """Refuse all if one file of one stage is not known to be what Snakemake would make now."""
    records, pulled = Records(), read_pulled()
    for stage in taken:
        own = of_stage(stage, made)
        check_done(stage, taken, made)
        for above in stage.upstream:
            if above in status and above not in [one.name for one in taken]:
                raise Refusal(f"{stage.name}: it reads {above}, which DVC does not know as it is now; adopt both")
        if broken := records.incomplete([one.path for one in own]):
            raise Refusal(f"{stage.name}: the job of {shown(broken)} did not end; run: snakemake -- {stage.name}")
        doubts = {one.path: (one.rule, why) for one in own if (why := doubt(one.path, records.of(one.path), pulled))}
        if doubts:
            again = " ".join(sorted({rule for rule, _ in doubts.values()}))
            said = f"{stage.name}: {shown(doubts)}: {doubts[min(doubts)][1]}"
            raise Refusal(f"{said}; run: snakemake --forcerun {again} -- {stage.name}")
        check_strays(stage, own)


def check_done(stage, taken, made):
    """Refuse while Snakemake would make something again: also what `--config` made, whose parameters differ."""
    pending = [one for one in made if one.pending]
    if own := of_stage(stage, pending):
        again = min(own, key=lambda one: (one.status == "ok", one.path))
        reason = "what it is made from would be made again" if again.status == "ok" else again.status
        missing = " ".join(one.name for one in taken if of_stage(one, pending))
        mend = f"run: snakemake -- {missing}; or make pull, if DVC restored what it reads"
        raise Refusal(f"{stage.name}: Snakemake would make {again.path} again ({reason}); {mend}")


def check_strays(stage, own):
    """Refuse files that no job makes: DVC records folders whole, with what older parameters left there."""
    known = {Path(one.path) for one in own}
    files = [path for out in stage.outs for path in Path(out).rglob("*") if not path.is_dir()]
    loose = {str(path) for path in files if not known & {path, *path.parents}}
    if loose:
        loose -= set(run("dvc", "check-ignore", *loose).stdout.splitlines())
    if loose:
        raise Refusal(f"{stage.name}: no job makes {shown(loose)}; remove what is left of an earlier run")


# pull: DVC -> Snakemake


def pull(names):
    """Restore what DVC records and make it known to Snakemake; returns what became of each stage."""
    stages = read_stages()
    recorded = YAML(typ="safe").load(LOCK.read_text())["stages"] if LOCK.exists() else {}
    needed = with_upstream(named(names or [name for name in stages if name in recorded], stages), stages)
    for stage in needed:
        if stage.name not in recorded:
            raise Refusal(f"{stage.name}: {LOCK} has no record of it; run: dvc repro {stage.name}")
    check_clean(needed, kinds={"changed outs"}, but=ABSENT)
    targets = [stage.name for stage in needed]
    if targets:
        if run("dvc", "checkout", *targets).returncode:
            tell("dvc", "pull", *targets)
        check_clean(needed)
        made = plan(needed, before=["--touch", "--forceall", "--quiet", "all", "--", *targets])
        if again := [one.path for one in made if one.pending]:
            raise Refusal(f"Snakemake would still make {shown(again)}; the rules and {DVC_YAML} differ; run: make sync")
        note_pulled(made, Records())
    left = {name: "left: no record" for name in stages if not names and name not in recorded}
    return dict.fromkeys(targets, "known to Snakemake") | left


def with_upstream(wanted, stages):
    """Stages and all that they are made from, each after what it reads."""
    todo, found = [stage.name for stage in wanted], set()
    while todo:
        name = todo.pop()
        found.add(name)
        todo += set(stages[name].upstream) - found
    return [stages[name] for name in stages if name in found]


def check_clean(needed, kinds=None, but=()):
    """Refuse a stage that is not as DVC records it: in anything, or in some `kinds`, `but` for some changes."""
    status = dvc_status()
    for stage in needed:
        for kind, changes in status.get(stage.name, {}).items():
            found = {path: change for path, change in changes.items() if change not in but}
            if (kinds is None or kind in kinds) and (found or not changes):
                what = "; ".join(f"{path}: {words(change)}" for path, change in found.items()) or kind
                mend = f"run: make adopt STAGE={stage.name} if Snakemake made it so, else dvc repro {stage.name}"
                raise Refusal(f"{stage.name}: {LOCK} is of another state ({what}); {mend}")


def words(change):
    """What DVC says of a dependency: one word, or one for each parameter."""
    return change if isinstance(change, str) else ", ".join(f"{key} {word}" for key, word in change.items())


# Both tools, asked from outside


def run(tool, *arguments):
    """Run a tool of this environment and keep what it says."""
    return subprocess.run([BIN / tool, *arguments], capture_output=True, text=True)


def tell(tool, *arguments):
    """The same, and it must succeed; returns what it printed."""
    return printed(run(tool, *arguments), f"{tool} {arguments[0]}")


def printed(done, command):
    """What a command printed that ended well; a refusal in its own words where it did not."""
    if done.returncode:
        said = done.stdout + done.stderr
        _, error, paragraph = said.partition("ERROR: ")  # DVC's; Snakemake's is the last line
        line = paragraph.partition("\n\n")[0] if error else said.strip().rpartition("\n")[2].removeprefix("error: ")
        raise Refusal(f"{command}: {' '.join(line.split()) or f'exit code {done.returncode}'}")
    return done.stdout


def snakemake(*commands):
    """What the last of some commands printed, run one after the other until one fails.

    One process runs them all: to import Snakemake takes longer than what is asked of it here.
    """
    words = json.dumps(commands)
    done = subprocess.run([sys.executable, "-c", ONE_BY_ONE, words], capture_output=True, text=True)
    return printed(done, f"snakemake {commands[0][0]}")


def read_stages():
    """The stages of dvc.yaml by name, each after the stages that it reads."""
    if not DVC_YAML.exists():
        raise Refusal(f"there is no {DVC_YAML} here; go to the root of the repository")
    document = YAML(typ="safe").load(DVC_YAML.read_text())
    outs = outs_of(document)
    upstream = {
        name: sorted({found[0] for dep in entry.get("deps", []) if (found := owner(dep, outs))})
        for name, entry in document["stages"].items()
    }
    order = TopologicalSorter(upstream).static_order()
    return {name: Stage(name, tuple(outs[name]), tuple(upstream[name])) for name in order}


def named(names, stages):
    """The stages that were named; an unknown one is refused with the nearest."""
    for name in names:
        if name not in stages:
            near = get_close_matches(name, stages, 1, 0) or [""]
            raise Refusal(f"{name!r} is no stage of {DVC_YAML}; did you mean {near[0]!r}?")
    return [stages[name] for name in stages if name in names]


def dvc_status():
    """What is not as dvc.lock records it: {stage: {kind of change: {path: change}}}."""
    try:
        with Repo() as repo:
            found = repo.status()
    except DvcException as problem:
        raise Refusal(f"dvc status: {' '.join(str(problem).split())}") from None
    changes = {}
    for stage, entries in found.items():
        kinds = [{entry: {}} if isinstance(entry, str) else entry for entry in entries]
        changes[stage] = {kind: paths for entry in kinds for kind, paths in entry.items()}
    return changes


def plan(stages, before=None):
    """What the jobs of these stages make, and whether Snakemake would make it again, after a command of its own."""
    triggers = ["--rerun-incomplete", "--rerun-triggers", *TRIGGERS]
    summary = ["--summary", *triggers, "--", *(stage.name for stage in stages)]
    said = snakemake(*([before] if before else []), summary)
    lines = [line.split("\t") for line in said.splitlines()]
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


if __name__ == "__main__":
    main()

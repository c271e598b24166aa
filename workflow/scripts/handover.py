"""Hand results from one tool to the other: what Snakemake made to DVC, what DVC restored to Snakemake.

    python workflow/scripts/handover.py adopt [STAGE...]   records what `snakemake` made; `dvc repro` then runs nothing
    python workflow/scripts/handover.py pull [STAGE...]    restores what DVC records; `snakemake` then runs nothing

Neither runs a job. Both tools believe what they are told here: `dvc commit -f` records any file that is there,
`snakemake --touch` calls any file made with the parameters of now. So everything is checked first, and one
doubt ends the handover before anything is recorded. docs/pipeline.md says what is refused, and why.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from pathlib import Path

from both_tools import Refusal, complaint, dvc_status, named, of_stage, plan, read_stages, run, shown
from dvc_sync import DVC_YAML, make_folders
from job_records import Records, doubt, note_pulled, read_pulled
from ruamel.yaml import YAML

LOCK = Path("dvc.lock")
GONE = {"deleted", "not in cache"}  # what DVC says of an out that only has to be fetched


# adopt: Snakemake -> DVC


def adopt(names):
    """Record in DVC what Snakemake made; returns a line for each stage."""
    stages, status = read_stages(), dvc_status()
    wanted = named(names or stages, stages)
    changed = [stage for stage in wanted if stage.name in status]
    made = plan(changed) if changed else []
    left = {}
    for stage in () if names else changed:  # each after those that it reads
        if why := untouched(stage, status, made, left):
            left[stage.name] = why
    taken = [stage for stage in changed if stage.name not in left]
    if taken:
        check_adoptable(taken, stages, status, made)
        commit(taken)
    fates = {stage.name: "recorded" for stage in taken} | left
    return {stage.name: fates.get(stage.name, "up to date") for stage in wanted}


def untouched(stage, status, made, left):
    """Why an unnamed stage is left alone: no job has made anything of it since DVC's record.

    One of which nothing is asked for is as made as what it reads.
    """
    outs, own = status[stage.name].get("changed outs", {}), of_stage(stage, made)
    if not own and left.keys() & stage.upstream:
        return "left: nothing of it is asked for"
    if own and not any(Path(out).exists() for out in stage.outs):
        return "left: not made"
    if not outs and any(one.pending for one in own):
        return "left: as recorded earlier, and Snakemake would make it again"
    return None


def check_adoptable(taken, stages, status, made):
    """Refuse all if one file of one stage is not known to be what Snakemake would make now."""
    records, pulled = Records(), read_pulled()
    for stage in taken:
        own = of_stage(stage, made)
        check_done(stage, taken, made, [one for one in stages.values() if one.name not in status])
        check_upstream(stage, taken, status)
        check_complete(stage, own, records)
        check_made(stage, own, records, pulled)
        check_strays(stage, own)


def check_done(stage, taken, made, unchanged):
    """Refuse while Snakemake would make something again: also what `--config` made, whose parameters differ.

    Where it would remake even what DVC calls unchanged, DVC has restored that and Snakemake is to be told first. All
    stages of which something is missing are named at once.
    """
    pending = [one for one in made if one.pending]
    if not of_stage(stage, pending):
        return
    restored = [one for one in unchanged if of_stage(one, pending)]
    first = restored[0] if restored else stage
    again = min(of_stage(first, pending), key=lambda one: (one.status == "ok", one.path))
    reason = "what it is made from would be made again" if again.status == "ok" else again.status
    missing = " ".join(one.name for one in taken if of_stage(one, pending))
    mend = f"DVC restored it, so run: {make('pull', restored)}" if restored else f"run: snakemake -- {missing}"
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
    for stage in taken:
        make_folders(stage.outs)
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

"""Kill one process of a run at a random moment, type the same command again, and compare with undisturbed runs.

    python validation/pipeline/kill_runs.py --times 10 --seed 0

In a copy of this repository (.runs/kill-test-dvc) the report is reproduced undisturbed, once for each of a few sets of
parameters. Then `dvc repro` or `snakemake` is started with other parameters than those of the results
that are there, and at a random moment of the time that this takes ONE of the processes gets SIGKILL: DVC, Snakemake or
a worker, without its children; or all of them. The same command is typed again at once, every second time after the
parameters were changed once more: whatever was left of the killed run then has the old ones. In the end the files must
be those of the undisturbed run with these parameters, so must dvc.lock after `dvc repro`, and no process may be left.
The run-cache is emptied before each run, and the store of what was measured before each one that is to be killed, so
that nothing is restored which was to be computed; the next call may go on from what the killed one has stored.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "workflow" / "scripts")]

import outcome  # noqa: E402
from kill_rules import decks, family, kill, preset_text, session, sweep  # noqa: E402

from kvlab.output.format import fixed, table  # noqa: E402

DVC, SNAKEMAKE = "dvc", "snakemake"
DVC_ALONE, SNAKEMAKE_ALONE, WORKER, ALL = "dvc alone", "snakemake alone", "a worker", "all at once"
KINDS = [(DVC, victim) for victim in (DVC_ALONE, SNAKEMAKE_ALONE, WORKER, ALL)]
KINDS += [(SNAKEMAKE, victim) for victim in (SNAKEMAKE_ALONE, WORKER, ALL)]
# Parameters that are run: much follows from the first change, little from the second.
STATES = {"given": [], "other bits": ["bits=2"], "other noise": ["noise.seed=7"]}
# What DVC says when it was killed while it wrote dvc.lock, and what mends that: the run-cache has all of it.
BROKEN_LOCK = ("dvc.lock' is invalid", "dvc.lock' validation failed")
REMEDY = ("rm", "dvc.lock")
HEADERS = ("kill", "typed", "killed", "at work", "s", "parameters", "next call", "recovered by", "equal")
NAP = 0.01  # seconds between two looks for a process to kill
LIMIT = 1800  # seconds in which a command ends, or never


@dataclass(frozen=True)
class Truth:
    """What an undisturbed run leaves, and how long it takes."""

    files: dict[str, str]
    lock: dict
    seconds: float


@dataclass(frozen=True)
class Kill:
    """Who is killed in which run: `share` is the moment, in the time that the run takes undisturbed."""

    tool: str
    victim: str
    towards: str
    then: str
    share: float


@dataclass
class Row:
    """One kill, as the table shows it."""

    kill: Kill
    at_work: str
    seconds: float
    said: str
    recovered_by: str
    wrong: list[str]

    def cells(self, number):
        states = self.kill.towards
        states += f", then {self.kill.then}" if self.kill.then != self.kill.towards else ""
        words = [str(number), self.kill.tool, self.kill.victim, self.at_work, fixed(self.seconds, 1), states]
        return [*words, self.said, self.recovered_by, "NO" if self.wrong else "yes"]


class Lab:
    """A copy of this repository as it is here, with its own git, DVC and parameters."""

    def __init__(self, place, preset, changes, stage):
        self.place, self.stage = place, stage
        self.commands = {DVC: ("dvc", "repro", stage), SNAKEMAKE: ("snakemake", "--", stage)}
        self.params = {name: preset_text(preset, [*changes, *own]) for name, own in STATES.items()}
        self.log = place / ".snakemake" / "kill-test.log"
        self.copy()

    def copy(self):
        """All files that git knows or would take, results and their record apart."""
        shutil.rmtree(self.place, ignore_errors=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
        for name in (name for name in names if name and name != "dvc.lock" and not name.startswith(outcome.MADE)):
            if os.path.lexists(ROOT / name):
                (self.place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.place / name, follow_symlinks=False)
        self.set("given")
        self.log.parent.mkdir()
        me = ["-c", "user.name=kill", "-c", "user.email=kill@localhost"]
        for words in (["init", "-q"], ["add", "-A"], [*me, "commit", "-q", "-m", "copy"]):
            subprocess.run(["git", *words], cwd=self.place, check=True)

    def set(self, state):
        """Change params.yaml, and take away what DVC could restore instead of running."""
        (self.place / "params.yaml").write_text(self.params[state])
        shutil.rmtree(self.place / ".dvc" / "cache" / "runs", ignore_errors=True)

    def forget(self):
        """Empty the store of what was measured, so that a run has to measure."""
        shutil.rmtree(self.place / outcome.STORE, ignore_errors=True)

    def start(self, command):
        """Begin a command as a shell would: in a session of its own."""
        own = {"PATH": f"{outcome.BIN}:{os.environ['PATH']}"}
        inherited = outcome.surroundings(self.place)
        environment = {key: value for key, value in inherited.items() if key != "PYTHONPATH"} | own
        return subprocess.Popen(
            command,
            cwd=self.place,
            env=environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def type(self, command):
        """Exit code and words of a command."""
        code = self.start(command).wait(timeout=LIMIT)
        return code, self.log.read_text()

    def lock(self):
        """What DVC has recorded, without the hashes of results that hold measured seconds."""
        recorded = yaml.load((self.place / "dvc.lock").read_text(), Loader=yaml.CSafeLoader)
        for stage in recorded["stages"].values():
            for entry in (*stage.get("deps", ()), *stage.get("outs", ())):
                if outcome.is_timed(entry["path"]) or outcome.is_timed(f"{entry['path']}/any.json"):
                    entry.pop("md5", None)
                    entry.pop("size", None)
        return recorded

    def disorder(self):
        """What may not be after any run: processes that are still at work, rows or cells twice."""
        left = [f"still runs: {' '.join(process.cmdline())}" for process in processes_in(self.place)]
        return left + outcome.miscounted(outcome.token_tables(self.place))

    def undisturbed(self, state):
        """The truth for one set of parameters, or the end."""
        self.set(state)
        self.forget()
        begin = time.monotonic()
        code, words = self.type(self.commands[DVC])
        seconds = time.monotonic() - begin
        bad = [words] if code else [*self.disorder(), *outcome.temporaries(self.place)]
        if bad:
            sys.exit("\n".join([f"error: the undisturbed run of {state!r} is not in order", *bad]))
        print(f"Undisturbed, {state}: {fixed(seconds, 0)} s", flush=True)
        return Truth(outcome.hashes(self.place), self.lock(), seconds)


def processes_in(place):
    """Processes whose working folder is a place."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == place and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def words_of(process):
    """The command line of a process; nothing when it is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_snakemake(process):
    return any(word.endswith("/snakemake") for word in words_of(process)[:2])


def is_worker(process):
    return words_of(process)[1:3] == ["-m", "kvlab"]


def verb_of(words):
    """What a worker does: the word after `python -m kvlab`, or after `step` there."""
    return words[4 if words[3] == "step" else 3]


def victims(name, leader, chance):
    """The processes that are to be killed now; none when there is no such process at this moment."""
    everyone = family(leader)
    chosen = {
        DVC_ALONE: lambda: everyone[:1],
        ALL: lambda: everyone,
        SNAKEMAKE_ALONE: lambda: [process for process in everyone if is_snakemake(process)][:1],
        WORKER: lambda: (workers := [p for p in everyone if is_worker(p)]) and [chance.choice(workers)],
    }
    return chosen[name]()


def at_work(leader):
    """What a run is doing: the stage, and the verbs of its workers."""
    everyone = family(leader)
    stages = [words_of(process)[-1] for process in everyone if is_snakemake(process)]
    verbs = sorted({verb_of(words) for process in everyone if is_worker(process) and (words := words_of(process))})
    return f"{stages[0] if stages else 'dvc itself'}: {', '.join(verbs) or 'no worker'}"


def strike(lab, attempt, truth, chance):
    """Run until the moment, and kill; returns what was at work and when, or None if the run was over before."""
    lab.set(attempt.towards)
    lab.forget()
    begin = time.monotonic()
    running = lab.start(lab.commands[attempt.tool])
    leader = psutil.Process(running.pid)
    doomed, moment = [], begin + attempt.share * truth[attempt.towards].seconds
    while not doomed and running.poll() is None:
        if time.monotonic() > moment:
            doomed = victims(attempt.victim, leader, chance)
        time.sleep(NAP)
    if not doomed:
        return None
    found = at_work(leader), time.monotonic() - begin
    kill(doomed)
    if attempt.victim == ALL:
        kill(session(running.pid))  # what was born while the others died
    running.wait(timeout=LIMIT)  # who has lost a child says so and ends
    return found


def recover(lab, command):
    """Type the command until it succeeds: what it said first, and what was needed; None if nothing is known to help."""
    needed, said = [], "done"
    for _ in range(2):
        code, words = lab.type(command)
        if not code:
            return said, ", ".join([*needed, "same command"])
        said = next((line for line in words.splitlines() if "error" in line.lower()), words[-200:])
        if not any(sign in words for sign in BROKEN_LOCK):
            return said, None
        lab.type(REMEDY)
        needed.append(" ".join(REMEDY))
    return said, None


def wrong_record(lab, truth):
    """What DVC has otherwise than undisturbed: files of its stages, or what it records of them."""
    lines = outcome.differences(truth.files, outcome.hashes(lab.place))
    return lines if lab.lock() == truth.lock else [*lines, "other: dvc.lock"]


def wrong_files(lab, truth):
    """What Snakemake has otherwise: of the files of its target those that are there, and what it would still make.

    Files of a stage that the target does not need stay as they were. A file in between that a killed job took away
    stays away when what follows from it is there: after the parameters were changed back, for instance.
    """
    rows = outcome.summary(lab.place, lab.stage)
    planned = {Path(row["output_file"]) for row in rows}
    pending = [f"not made: {row['output_file']}" for row in rows if row["plan"] != "no update"]
    found = outcome.hashes(lab.place)
    own = [name for name in found if planned & {Path(name), *Path(name).parents}]
    return pending + [f"other: {name}" for name in own if found[name] != truth.files.get(name)]


def play(lab, attempt, truth, chance):
    """One kill and what follows; None when the run was over before the moment."""
    struck = strike(lab, attempt, truth, chance)
    if struck is None:
        return None
    if attempt.then != attempt.towards:
        lab.set(attempt.then)
    said, recovered_by = recover(lab, lab.commands[attempt.tool])
    wrong = [] if recovered_by else [f"the next call failed:\n{lab.log.read_text()}"]
    wrong += {DVC: wrong_record, SNAKEMAKE: wrong_files}[attempt.tool](lab, truth[attempt.then]) + lab.disorder()
    sweep(lab.place)
    return Row(attempt, *struck, said, recovered_by or "NOTHING", wrong)


def drawn(tool, victim, change, current, longest, chance):
    """A kill on the way from the `current` parameters to others, not later than at the share `longest`."""
    towards = chance.choice([state for state in STATES if state != current])
    then = chance.choice([state for state in STATES if state != towards]) if change else towards
    return Kill(tool, victim, towards, then, longest * chance.random())


def rows_of(lab, truth, times, chance):
    """All kills: each kind before any of them again; every second one is followed by a change of the parameters."""
    changes, current = decks(chance, (True, False), times), list(truth)[-1]
    for (tool, victim), change in zip(decks(chance, KINDS, times), changes, strict=True):
        row, longest = None, 1.0
        while row is None:
            attempt = drawn(tool, victim, change, current, longest, chance)
            row = play(lab, attempt, truth, chance)
            current = attempt.then if row else attempt.towards
            longest /= 2  # it was over before the moment
        yield row


def parse():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--times", type=int, default=10, help="how often to kill")
    arguments.add_argument("--seed", type=int, default=0, help="chooses victims, moments and parameters")
    arguments.add_argument("--stage", default="report", help="what is run, with all that it needs")
    arguments.add_argument("--preset", default="quick", help="a file of workflow/presets, without .yaml")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one parameter")
    arguments.add_argument(
        "--at", type=Path, default=ROOT / ".runs" / "kill-test-dvc", help="emptied before it is used"
    )
    return arguments.parse_args()


def main():
    given = parse()
    chance = random.Random(given.seed)
    lab = Lab(given.at.absolute(), given.preset, given.set, given.stage)
    truth = {state: lab.undisturbed(state) for state in STATES}
    rows = []
    for row in rows_of(lab, truth, given.times, chance):
        rows.append(row)
        print(" | ".join(row.cells(len(rows))), *row.wrong, sep="\n", flush=True)
    wrong = sum(bool(row.wrong) for row in rows)
    print("", table(HEADERS, [row.cells(number) for number, row in enumerate(rows, 1)]), "", sep="\n")
    print(f"{len(rows)} killed, {wrong} after which something was other than undisturbed")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

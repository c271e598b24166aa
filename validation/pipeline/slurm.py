"""Run a preset on a real SLURM, started on this machine for the length of this script, and check what went through it.

    python validation/pipeline/slurm.py
    python validation/pipeline/slurm.py --against .runs/quick     byte for byte against a local run
    python validation/pipeline/slurm.py --target sigma --dvc data   a part of it, and a stage by `dvc repro`

It needs root on Debian or Ubuntu: SLURM and munge are installed where they are missing, and SLURM's own
commands read nothing but /etc/slurm/slurm.conf. A file there that this script did not write is left alone.
The daemons are children of this script and end with it, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "workflow" / "scripts"))

import asked  # noqa: E402
import outcome  # noqa: E402
import workspace  # noqa: E402

BIN = Path(sys.executable).parent
PROFILE = "workflow/profiles/slurm"
CONF = Path("/etc/slurm/slurm.conf")
SIGNATURE = "# Written by validation/pipeline/slurm.py for this one machine; removed when that ends."
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged")
FOLDER = ".slurm"  # in the workspace: logs, and the state of the daemons
PR_SET_PDEATHSIG = 1
PATIENCE = 60  # seconds for the daemons to come up, or to go
TAIL = 2000  # characters of a failed run that are printed
CONFIG = """\
{signature}
ClusterName=kvlab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
MinJobAge=86400
{node} NodeAddr=127.0.0.1 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def say(words):
    """A line on what happens, at once."""
    print(words, flush=True)


def refuse(reason):
    """Exit with one line."""
    sys.exit(f"error: {reason}")


def answer(*command, **given):
    """What a command prints; None when it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, **given)
    return ran.stdout if ran.returncode == 0 else None


def refuse_unfit():
    """Exit where this script would fail later, or meet a SLURM that is in use."""
    if os.geteuid() != 0:
        refuse("this starts a SLURM of its own, which needs root; on a cluster use the profile (docs/pipeline.md)")
    if CONF.exists() and not CONF.read_text().startswith(SIGNATURE):
        refuse(f"{CONF} is somebody's; this script would write its own. Use the profile itself (docs/pipeline.md)")
    if shutil.which("scontrol") and answer("scontrol", "ping") is not None:
        refuse("a slurmctld answers already: wait until the other test has ended")


def install():
    """Debian's packages, where one of their programs is missing."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        refuse(f"no {', '.join(missing)} here, and no apt-get to install {' '.join(PACKAGES)} with")
    say(f"installing {' '.join(PACKAGES)}")
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "update", "-qq"], check=False, **quiet)
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    if subprocess.run(command, **quiet).returncode:
        refuse(f"apt-get could not install {' '.join(PACKAGES)}; its words are above")


def ends_with_parent():
    """Let the kernel end this process when the script is gone, even by SIGKILL. Runs in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def daemon(folder, *command, user=None):
    """Start a daemon in the foreground, apart from this terminal's Ctrl-C; its words go to a file."""
    with (folder / f"{command[0]}.log").open("w") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            user=user,
            group=user,
            preexec_fn=ends_with_parent,
        )


def wait_until(ready, daemons, what):
    """Wait for a condition; exits when a daemon has ended, or after a minute."""
    end = time.monotonic() + PATIENCE
    while not ready():
        gone = [process.args[0] for process in daemons if process.poll() is not None]
        if gone or time.monotonic() > end:
            refuse(f"{what} did not come up{': ' + ', '.join(gone) + ' ended' if gone else ''}")
        time.sleep(0.5)


@contextlib.contextmanager
def slurm(folder):
    """A SLURM of one node, which is this machine, with its state in `folder`."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    # `slurmd -C` describes this machine in the words of slurm.conf.
    node = subprocess.check_output(["slurmd", "-C"], text=True).splitlines()[0]
    host = re.match(r"NodeName=(\S+)", node)[1]
    CONF.write_text(CONFIG.format(signature=SIGNATURE, host=host, folder=folder, node=node))
    daemons = []
    try:
        if answer("munge", "-n") is None:
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            daemons.append(daemon(folder, "munged", "--foreground", user="munge"))
            wait_until(lambda: answer("munge", "-n") is not None, daemons, "munged")
        daemons += [daemon(folder, "slurmctld", "-D"), daemon(folder, "slurmd", "-D")]
        wait_until(lambda: (answer("sinfo", "-h", "-o", "%T") or "").strip() == "idle", daemons, "the node")
        yield node
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave daemons behind
        cancel_jobs()
        for process in reversed(daemons):
            end(process)
        CONF.unlink()


def cancel_jobs():
    """Cancel what is still running, and wait for it; a controller that does not answer has no jobs."""
    answer("scancel", "--user", "root")
    end = time.monotonic() + PATIENCE
    while answer("squeue", "-h") and time.monotonic() < end:
        time.sleep(0.5)


def end(process):
    """End one daemon by its id."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(command, place, log, environment):
    """Run a command in a workspace with its words in a file, and count its steps aloud; exits when it fails."""
    begun = time.monotonic()
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "preexec_fn": ends_with_parent}
    with log.open("w", buffering=1) as words, subprocess.Popen(command, cwd=place, env=environment, **pipe) as process:
        try:
            for line in process.stdout:
                words.write(line)
                if re.match(r"\d+ of \d+ steps", line):
                    say(f"  {line.strip()}, {time.monotonic() - begun:.0f} s")
        except SystemExit:
            process.terminate()
            raise
    if process.returncode:
        refuse(f"{' '.join(map(str, command))} failed:\n{log.read_text()[-TAIL:]}")
    return log.read_text()


def fresh(place, preset):
    """A new workspace; one that an earlier run of this script left is taken away. Returns its folder for logs."""
    if place.exists() and any(place.iterdir()) and not (place / FOLDER).is_dir():
        refuse(f"{place} is not empty, and not this script's; name a new folder with --at")
    shutil.rmtree(place, ignore_errors=True)
    os.chdir(ROOT)
    workspace.make(place, workspace.preset_params(preset))
    (place / FOLDER).mkdir()
    return place / FOLDER


def plan(place, target):
    """What the jobs of a target ask for, each as often as it is planned."""
    command = [sys.executable, ROOT / "validation/pipeline/asked.py", "--json", "--profile", PROFILE, "--", target]
    listed = subprocess.run(command, cwd=place, env=environment(place), capture_output=True, text=True)
    if listed.returncode:
        refuse(f"no plan for {target}:\n{listed.stderr.strip()}")
    return asked.read(listed.stdout)


def environment(place):
    """What Snakemake and DVC run with: this node lends no GPUs, a profile reaches DVC this way, and what was measured
    elsewhere is not taken.
    """
    path = f"{BIN}:{os.environ['PATH']}"
    return outcome.surroundings(place) | {"PATH": path, "KVLAB_GPUS": "0", "SNAKEMAKE_PROFILE": PROFILE}


def minutes(words):
    """Minutes of SLURM's [days-][hours:]minutes:seconds."""
    days, _, clock = words.rpartition("-")
    hours, minute, _ = [0, *map(int, clock.split(":"))][-3:]
    return int(days or 0) * 1440 + hours * 60 + minute


def through_slurm():
    """(state, what it was given) of every job that SLURM knows, oldest first. Snakemake's comment names the rule."""
    lines = answer("squeue", "--states=all", "--noheader", "--sort=i", "--format=%T|%k|%C|%m|%l").splitlines()
    jobs = []
    for state, comment, cores, memory, limit in (line.split("|") for line in lines):
        rule = comment.removeprefix("rule_").partition("_wildcards_")[0]
        given = asked.Asked(rule, int(cores), int(memory.removesuffix("M")), minutes(limit), 0)
        jobs.append((state, given))
    return jobs


def check_jobs(planned, known):
    """Exit unless exactly the planned jobs went through SLURM, each with what its rule asks for."""
    failed = [f"{given.rule} {state}" for state, given in known if state != "COMPLETED"]
    if failed:
        refuse(f"not completed: {', '.join(failed)}")
    wanted, got = Counter(planned), Counter(given for _, given in known)
    if wanted != got:
        refuse(f"planned but not seen in SLURM: {wanted - got}; seen but not planned: {got - wanted}")
    say(f"{len(known)} of {len(planned)} planned jobs: completed by SLURM, with their cores, memory and time")


def check_again(place, target):
    """Exit unless a second run finds nothing to do."""
    again = run([BIN / "snakemake", target], place, place / FOLDER / "again.log", environment(place))
    if "Nothing to be done" not in again:
        refuse(f"a second run had something to do:\n{again[-TAIL:]}")
    say("a second run: nothing to be done")


def check_same(place, local):
    """Exit unless every result has the same bytes as in a local run."""
    here, there = outcome.hashes(place), outcome.hashes(local)
    if lines := outcome.differences({name: there[name] for name in there if name in here}, here):
        refuse(f"other than in {local}:\n" + "\n".join(lines))
    say(f"{len(here)} files: the same as in {local}")


def check_dvc(place, stage, folder):
    """`dvc repro STAGE` in a clone of what is committed, with the workspace's parameters."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    shutil.copy(place / "params.yaml", clone)
    planned, before = plan(clone, stage), len(through_slurm())
    run([BIN / "dvc", "repro", stage], clone, folder / "dvc.log", environment(clone))
    check_jobs(planned, through_slurm()[before:])
    if answer(BIN / "dvc", "status", "--quiet", stage, cwd=clone, env=environment(clone)) is None:
        refuse(f"dvc status: {stage} is not as recorded in {clone}")
    say(f"dvc repro {stage}: through SLURM")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--preset", default="quick", help="default: quick")
    arguments.add_argument("--target", default=outcome.REPORT, help=f"default: {outcome.REPORT}")
    arguments.add_argument("--at", type=Path, default=ROOT / ".runs/slurm", help="made anew; default: .runs/slurm")
    arguments.add_argument("--against", type=Path, help="a finished local run of the same parameters")
    arguments.add_argument("--dvc", metavar="STAGE", help="also `dvc repro STAGE` with the profile, in a clone")
    given = arguments.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    refuse_unfit()
    install()
    place = given.at.absolute()
    folder = fresh(place, given.preset)
    planned = plan(place, given.target)
    with slurm(folder) as node:
        say(f"SLURM is up: {node}")
        begun = time.monotonic()
        run([BIN / "snakemake", given.target], place, folder / "snakemake.log", environment(place))
        say(f"{given.target}: {time.monotonic() - begun:.0f} s")
        check_jobs(planned, through_slurm())
        check_again(place, given.target)
        if given.against:
            check_same(place, given.against.absolute())
        if given.dvc:
            check_dvc(place, given.dvc, folder)
    say("SLURM has ended")


if __name__ == "__main__":
    main()

"""Bring results from the cache or the remote instead of computing them, and say of each stage where it came from.

    python workflow/scripts/ci_cached.py                    stage report, with results/gap/FINDINGS.md
    python workflow/scripts/ci_cached.py ladder planted     other stages of dvc.yaml
    python workflow/scripts/ci_cached.py --require-cached   run no stage but `code`: stop where one would have to
    python workflow/scripts/ci_cached.py --run-missing      run also what neither the cache nor the remote holds

It is `dvc repro --pull --allow-missing`, which downloads nothing for a stage whose inputs are those of dvc.lock,
and `dvc pull` of the stages asked for. A stage whose inputs changed is looked up in the run-cache, and run when it
is not there. Meant for a fresh clone: like `dvc repro`, it removes the outputs of a stage before it runs it.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from dvc.config import ConfigError
from dvc.exceptions import CheckoutError, DvcException, NotDvcRepoError
from dvc.repo import Repo

from kvlab.core.errors import Fault, KvlabError, UnknownName, UserError

LOOK = "code"  # the stage that says what the code does: it computes no result, and a comment is enough for it to run
LOCK, RUN_CACHE, RAN = "as in dvc.lock", "from the run-cache", "run"
# What DVC logs of a stage, before its arguments are put in. A stage's own command cannot write such a record.
OUTCOMES = {
    "Stage '%s' didn't change, skipping": LOCK,
    "Pulling data for %s": LOCK,
    "Stage '%s' is cached - skipping run, checking out outputs": RUN_CACHE,
    "Running stage '%s':": RAN,
}
# They warn of an absent remote and of each missing file; one line that says what to do comes instead.
TALKATIVE = ("dvc.data_cloud", "dvc.repo.reproduce", "dvc_data.index.fetch")


class Watch(logging.Handler):
    """Keeps the last outcome of each stage; with `run_none` it stops DVC before a stage's command is started."""

    def __init__(self, run_none):
        super().__init__()
        self.run_none = run_none
        self.outcomes = {}

    def emit(self, record):
        outcome = OUTCOMES.get(record.msg)
        if outcome is None:
            return
        stage = getattr(record.args[0], "addressing", record.args[0])
        if outcome is RAN and self.run_none and stage != LOOK:
            raise Fault(f"stage {stage} would have to run: neither dvc.lock nor the run-cache knows its inputs")
        self.outcomes[stage] = outcome


def listen(run_none):
    """A `Watch` on what DVC logs of its stages."""
    watch = Watch(run_none)
    logging.getLogger("dvc.stage").addHandler(watch)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    return watch


def is_missing(problem):
    """Whether DVC gave up because data is nowhere to be had, and not because a command failed."""
    return isinstance(problem, CheckoutError) or isinstance(problem.__cause__, CheckoutError)


def nowhere(repo, stages):
    """The line for data that is in no cache and no remote."""
    name = repo.config["core"].get("remote")
    remote = f"the remote {name!r} ({repo.config['remote'][name]['url']})" if name else "a remote, as none is set"
    return (
        f"results of {', '.join(stages)} or of the stages before are neither in the cache nor in {remote}; push them"
        " from a checkout that has them, name another remote (docs/pipeline.md), or make them: --run-missing"
    )


def obtain(repo, stages, run_missing):
    """Bring `stages` and their outputs into the workspace."""
    try:
        repo.reproduce(stages, pull=True, allow_missing=True)
        repo.pull(stages)
    except DvcException as problem:
        if not is_missing(problem):
            raise
        if not run_missing:
            raise UserError(nowhere(repo, stages)) from problem
        print("Not all of it is in the cache or the remote: what is missing is run.", flush=True)
        repo.reproduce(stages, pull=True)


def account(outcomes):
    """A line per stage, and the sum."""
    width = max(map(len, outcomes), default=0)
    lines = [f"  {stage:{width}}  {outcome}" for stage, outcome in outcomes.items()]
    found = list(outcomes.values())
    counted = ", ".join(f"{found.count(kind)} {kind}" for kind in (LOCK, RUN_CACHE, RAN))
    return "\n".join(["", *lines, f"{len(found)} stages: {counted}."])


def check_complete(repo, stages, outcomes):
    """Refuse an account that leaves out a stage, as it would when DVC words its messages anew."""
    chain = {stage.addressing for name in stages for stage in repo.stage.collect(name, with_deps=True)}
    silent = sorted(chain - outcomes.keys())
    if silent:
        raise Fault(f"DVC did not say what became of {', '.join(silent)}; OUTCOMES is not for this version of DVC")


def bring(stages, require_cached, run_missing):
    """Bring the results of `stages` into the workspace here, and print where each stage's came from."""
    watch = listen(run_none=require_cached)
    with Repo() as repo:
        known = {stage.addressing: stage for stage in repo.index.stages}
        for name in stages:
            if name not in known:
                raise UnknownName("stage", name, known)
        outs = [os.path.relpath(out.fs_path) for name in stages for out in known[name].outs]
        try:
            obtain(repo, stages, run_missing)
        except DvcException:
            print(account(watch.outcomes), flush=True)
            raise
        check_complete(repo, stages, watch.outcomes)
    print(account(watch.outcomes))
    print(f"Here now: {', '.join(outs)}")


def stop(problem):
    """Say the problem and what caused it in one line, and exit."""
    problems = [problem, problem.__cause__] if isinstance(problem, DvcException) else [problem]
    own = next((item for item in problems if isinstance(item, KvlabError)), None)
    said = [own] if own else filter(None, problems)
    print("error:", " ".join(": ".join(map(str, said)).split()), file=sys.stderr)
    is_users = isinstance(problem, (ConfigError, NotDvcRepoError, OSError))
    raise SystemExit(own.exit_code if own else 2 if is_users else 1)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("stages", nargs="*", default=["report"], help="stages of dvc.yaml; default: report")
    arguments.add_argument("--at", type=Path, default=Path(), help="the checkout; default: here")
    how = arguments.add_mutually_exclusive_group()
    how.add_argument("--require-cached", action="store_true", help="stop before a stage is run")
    how.add_argument("--run-missing", action="store_true", help="run what neither the cache nor the remote holds")
    given = arguments.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the stages' snakemake
    try:
        os.chdir(given.at)
        bring(given.stages, given.require_cached, given.run_missing)
    except Exception as problem:  # the library of a remote raises kinds of its own
        stop(problem)


if __name__ == "__main__":
    main()

"""`dvc` as it is installed, but a dry run goes on where a file is missing: `dvc repro --dry` in a fresh clone.

    python workflow/scripts/dvc_dry.py repro --dry
    python workflow/scripts/dvc_dry.py exp run -S bits=4 --dry

Before DVC runs a stage it looks the stage up in its run-cache, by the hashes of what the stage reads. It does so in a
dry run too, in which nothing has made the outputs of the stages before, and ends with "No such file or directory"
(issues 9818 and 10135 of treeverse/dvc, open; seen with 3.67.1). A stage whose inputs are missing is in no cache, and
that is what DVC is told here. With --allow-missing it also forgets that a stage reads what another, named before it,
would make anew. An experiment is tried in a folder that has no results, so that every stage would run; what was made
here counts as there. `make setup` writes this file over `.venv/bin/dvc`; without --dry it changes nothing, but for one
more line where DVC fails because dvc.yaml names more models than params.yaml has.
"""

import re
import sys
from pathlib import Path


def go_on_where_files_are_missing():
    """A stage with inputs that are not there is not looked up in the run-cache."""
    from dvc.stage import cache

    can_hash = cache._can_hash

    def can_hash_what_is_there(stage):
        try:
            return can_hash(stage)
        except FileNotFoundError:
            return False

    cache._can_hash = can_hash_what_is_there


def carry_changes_on():
    """A stage has changed when one that it reads would run."""
    from dvc.stage import Stage

    changed, run, named = Stage.changed, Stage.run, set()

    def changed_or_after_a_change(stage, allow_missing=False, upstream=None):
        after = any(one.addressing in named for one in upstream or ())
        return after or changed(stage, allow_missing, upstream)

    def run_and_remember(stage, **options):
        named.add(stage.addressing)
        return run(stage, **options)

    Stage.changed, Stage.run = changed_or_after_a_change, run_and_remember


def see_what_is_here():
    """An experiment is tried in a folder with what git has; there, what was made here is linked to."""
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    try:
        here, reproduce = Path(Repo.find_root()), Repo.reproduce
    except NotDvcRepoError:  # which DVC says
        return

    def reproduce_what_is_here(repo, *targets, **options):
        for out in repo.index.outs if Path(repo.root_dir) != here else ():
            path = Path(out.fs_path)
            made = here / path.relative_to(repo.root_dir)
            if made.exists() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(made)
        return reproduce(repo, *targets, **options)

    Repo.reproduce = reproduce_what_is_here


def models_that_are_gone():
    """How dvc.yaml names those models that params.yaml does not have, sorted."""
    try:
        from dvc.utils.serialize import load_yaml

        has = len(load_yaml("params.yaml")["models"])
        named = set(re.findall(r"\$\{models\[(\d+)\]\.path\}", Path("dvc.yaml").read_text()))
    except Exception:  # DVC has said what is wrong with them
        return []
    return [f"models[{number}]" for number in sorted(map(int, named)) if number >= has]


if __name__ == "__main__":
    if "--dry" in sys.argv:
        go_on_where_files_are_missing()
        carry_changes_on()
        see_what_is_here()
    from dvc.cli import main

    code = main()
    if code and (gone := models_that_are_gone()):
        print(f"error: params.yaml has no {', '.join(gone)}, which dvc.yaml names; run: make sync", file=sys.stderr)
    sys.exit(code)

"""`kvlab init`: a params.yaml for a model, to study it as a whole. Heavy imports happen inside."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from kvlab.cli.flags import ENGINES, choice, number, result, whole, word


def init_verb(
    model: Annotated[str, word("folder of a Hugging Face model, or a hub id with --revision", metavar="DIR|ID")],
    revision: Annotated[str | None, word("commit or tag of a hub id", metavar="REV")] = None,
    engines: Annotated[list[str], choice("default: hf and vllm", ENGINES, metavar="{hf,vllm} ...")] = ENGINES,
    windows: Annotated[int, number("scored windows; default: 16", whole(2))] = 16,
    text: Annotated[str, word("a text file or a glob, or datasets:ID; default: docstrings")] = "docstrings",
    out: Annotated[Path, result("default: params.yaml")] = Path("params.yaml"),
) -> None:
    """Write a params.yaml for your model, to study it as a whole.

    Everything that is worth changing has a comment. `kvlab params` checks and prints it. In a checkout, `make findings`
    runs what params.yaml says, and `dvc` does after `make sync`, which lets dvc.yaml name its models. A file that is
    there is not replaced.

      kvlab init --model models/reference --engines hf --windows 8
    """
    from kvlab_pipeline.studies.init import write

    write(out, model, tuple(engines), windows, revision, text)
    print(f"{out}: {model} on {' and '.join(engines)}; next: {next_of(out)}")


def next_of(out: Path) -> str:
    """What to type after a params.yaml was written; in a checkout, which runs the file of that name alone."""
    check = f"kvlab params --params {shlex.quote(str(out))}"
    if not Path("dvc.yaml").exists():
        return check
    move = "" if out.absolute() == Path("params.yaml").absolute() else f"mv {shlex.quote(str(out))} params.yaml && "
    return f"{check}; to run it: {move}make sync findings"

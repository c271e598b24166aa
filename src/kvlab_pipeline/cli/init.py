"""`kvlab init`: a params.yaml for a model, to study it as a whole. Heavy imports happen inside."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from kvlab.cli.flags import Flag, result, whole, word


def init_verb(args: argparse.Namespace) -> None:
    """Write a params.yaml that studies your model, with a comment on everything that is worth changing.

    `kvlab params` checks and prints it. In a checkout, `make findings` runs what params.yaml says, and `dvc` does after
    `make sync`, which lets dvc.yaml name its models. A file that is there is not replaced.

      kvlab init --model models/reference --engines hf --windows 8
    """
    from kvlab_pipeline.studies.init import write

    write(args.out, args.model, tuple(args.engines), args.windows, args.revision, args.text)
    print(f"{args.out}: {args.model} on {' and '.join(args.engines)}; next: {next_of(args.out)}")


def next_of(out: Path) -> str:
    """What to type after a params.yaml was written; in a checkout, which runs the file of that name alone."""
    check = f"kvlab params --params {shlex.quote(str(out))}"
    if not Path("dvc.yaml").exists():
        return check
    move = "" if out.absolute() == Path("params.yaml").absolute() else f"mv {shlex.quote(str(out))} params.yaml && "
    return f"{check}; to run it: {move}make sync findings"


FLAGS: list[Flag] = [
    word("--model", "folder of a Hugging Face model, or a hub id with --revision", required=True, metavar="DIR|ID"),
    word("--revision", "commit or tag of a hub id", metavar="REV"),
    word("--engines", "default: hf and vllm", choices=("hf", "vllm"), nargs="+", default=["hf", "vllm"]),
    word("--windows", "scored windows; default: 16", type=whole(2), default=16, metavar="N"),
    word("--text", "a text file or a glob, or datasets:ID; default: docstrings", default="docstrings"),
    result("--out", "default: params.yaml", default=Path("params.yaml"), required=False),
]

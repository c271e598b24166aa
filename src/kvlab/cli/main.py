"""The command line: what a person types, and how it ends. What a verb does is in the file of its name."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli import calibrate, coded, evals, gate, logits, measure, recommend, snapshot, weights
from kvlab.cli.commands import Verbs, installed
from kvlab.cli.flags import choice
from kvlab.cli.parsing import command, fail, refusal

SHELLS = ("bash", "zsh", "fish")
COMPLETE = "_KVLAB_COMPLETE"  # set by the shell's script when it asks for what may come next


def completion_verb(shell: Annotated[str, choice("which shell", SHELLS, argument=True)]) -> None:
    """Complete verbs and flags in your shell: bash, zsh, fish.

    bash: kvlab completion bash > ~/.local/share/bash-completion/completions/kvlab
    zsh:  kvlab completion zsh > DIR/_kvlab, for a DIR of your $fpath
    fish: kvlab completion fish > ~/.config/fish/completions/kvlab.fish
    """
    from typer.completion import get_completion_script

    print(get_completion_script(prog_name="kvlab", complete_var=COMPLETE, shell=shell))


OWN = Verbs(
    "What compressing an LLM's KV cache costs: measured on your model, your text and your engine.",
    recommend.recommend_verb,
    recommend.check_verb,
    measure.measure_verb,
    logits.logits_verb,
    calibrate.calibrate_verb,
    coded.recipe_verb,
    coded.encode_verb,
    coded.decode_verb,
    coded.inspect_verb,
    evals.eval_verb,
    weights.weights_verb,
    completion_verb,
    ends="`kvlab VERB --help` says more. Exit codes: 0 done; 2 the input is wrong, 1 the run; a line says how.",
    snapshot=snapshot.SNAPSHOT,
    gate=gate.GATE,
)


@cache
def verbs() -> Verbs:
    """Every verb there is."""
    return OWN.with_more([*installed(), *of_the_checkout()])


def of_the_checkout() -> list[Verbs]:
    """What ``validation/`` adds, which stands beside the packages in a checkout and is not installed."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "validation" / "verbs.py").is_file():
        return []
    sys.path.append(str(checkout))
    return [import_module("validation.verbs").COMMANDS]


def _version(wanted: bool) -> None:
    """Print the version; it is looked up only when asked for."""
    if wanted:
        from importlib.metadata import version

        print(f"kvlab {version('kvlab')}")
        raise typer.Exit


def _flags(
    version: Annotated[bool, typer.Option("--version", help="print the version", callback=_version)] = False,
) -> None:
    """Those that stand before a verb."""


def main(arguments: list[str] | None = None) -> None:
    """Run one verb; errors become one line on stderr and an exit code."""
    if COMPLETE in os.environ:
        from typer.completion import completion_init

        completion_init()
    try:
        code = command("kvlab", verbs(), _flags).main(arguments, prog_name="kvlab", standalone_mode=False)
    except typer.TyperException as error:
        fail([refusal(error)], 2)
    if code:
        sys.exit(code)

"""`kvlab completion`: what a shell needs to complete verbs and flags."""

from __future__ import annotations

import argparse

from kvlab.cli.flags import Flag, word
from kvlab.cli.parsing import Parser

SHELLS = ("bash", "zsh", "fish")


def completion_verb(args: argparse.Namespace) -> None:
    """Print what makes your shell complete the verbs and flags of kvlab.

    bash: kvlab completion bash > ~/.local/share/bash-completion/completions/kvlab
    zsh:  kvlab completion zsh > DIR/_kvlab, for a DIR of your $fpath
    fish: kvlab completion fish > ~/.config/fish/completions/kvlab.fish
    """
    print(script(args.whole, args.shell))


def script(parser: Parser, shell: str) -> str:
    """The completion script of a command line, with the flags of every verb."""
    import shtab

    _completed(parser)
    return shtab.complete(parser, shell)


def _completed(parser: Parser) -> None:
    """Declare the flags that were put off, and what is a file or a folder."""
    import shtab

    parser.complete()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _completed(verb)
        elif action.metavar in ("FILE", "DIR", "FILE|JSON", "DB"):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE


FLAGS: list[Flag] = [word("shell", "which shell", choices=SHELLS)]

"""Argparse as this command line uses it: verbs that are functions, and refusals of one line with the nearest name."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

from kvlab.cli.flags import Verbs
from kvlab.core.errors import nearest, suggestion


class Parser(argparse.ArgumentParser):
    """Argparse that answers in one line and names the nearest verb or flag."""

    def __init__(self, *names, **options):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(*names, formatter_class=layout, allow_abbrev=False, **options)
        self._later: list[Callable[[argparse.ArgumentParser], None]] = []
        self._group = None

    def group(self, about: str):
        """Where verbs are added; `about`, which lists them, is all that --help prints below the usage."""
        self._group = about
        return self.add_subparsers(metavar="VERB", required=True, parser_class=Parser)

    def later(self, add: Callable[[argparse.ArgumentParser], None]) -> None:
        """Let flags that are dear to declare be added when this verb is the one that is asked for."""
        self._later.append(add)

    def complete(self) -> None:
        """Add what was put off."""
        while self._later:
            self._later.pop(0)(self)

    def format_help(self) -> str:
        """The help of a verb as argparse lays it out, of a group as it is written."""
        return super().format_help() if self._group is None else f"{self.format_usage()}\n{self._group}"

    def parse_known_args(self, args=None, namespace=None):
        """Refuse what is left over here, where the flags are known that it may have been meant for."""
        self.complete()
        self._refuse_unknown(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{rest[0]!r} is not known{suggestion(rest[0], self._option_string_actions)}")
        return found, rest

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse a flag that there is not, before argparse misses the one that it was meant for."""
        for word in words:
            if word == "--" or (self._group is not None and not word.startswith("-")):
                return  # what follows is no flag, or belongs to the verb
            name = word.partition("=")[0]
            if word.startswith("--") and name not in self._option_string_actions:
                self.error(f"{name!r} is not known{suggestion(name, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse a word that is no choice, and say which it may have been meant for."""
        if action.choices is None or value in action.choices:
            return
        near, allowed = nearest(str(value), action.choices), ", ".join(map(str, action.choices))
        hint = f"did you mean {near!r}?" if near else f"allowed: {allowed}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"verb {value!r} is not known; {hint}")
        raise argparse.ArgumentError(action, f"{value!r} is not known; {hint}")

    def error(self, message: str) -> None:
        """Leave with exit code 2 and one line."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def add_verbs(listed, verbs: Verbs) -> None:
    """Add verbs, each with its flags."""
    for function, flags in verbs.items():
        name, text = function.__name__.removesuffix("_verb"), inspect.getdoc(function)
        # `help` is what completion scripts show; --help of a group is its own text
        verb = listed.add_parser(name, description=text, help=text.partition("\n")[0])
        verb.set_defaults(step=function, asked=verb.prog)
        for flag in flags:
            if callable(flag):
                verb.later(flag)
            else:
                verb.add_argument(flag[0], **flag[1])


def add_groups(listed, groups: Mapping[str, tuple[str, Verbs]]) -> None:
    """Add verbs that are followed by a verb: by name, what lists them and what they are."""
    for name, (about, verbs) in groups.items():
        add_verbs(listed.add_parser(name, help=about.partition("\n")[0]).group(about), verbs)

"""Verbs by name, and what other packages add to them.

A package names its `Verbs` as an entry point in the group ``kvlab.commands``:

    [project.entry-points."kvlab.commands"]
    mechanisms = "kvlab_mechanisms.cli.commands:COMMANDS"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module

from kvlab.cli.packages import found

GROUP = "kvlab.commands"


class Verbs(dict):
    """Functions named VERB_verb by the name of their verb, and groups of such.

    The annotated signature of a function is its flags, the docstring its help.

    Parameters
    ----------
    about : str
        What --help says of the group above the list of its verbs.
    ends : str
        What it says below.
    """

    def __init__(self, about: str = "", *functions: Callable, ends: str = "", **groups: Verbs):
        super().__init__()
        self.about, self.ends = about, ends
        for function in functions:
            self.verb(function)
        self.update(groups)

    def verb(self, function: Callable) -> Callable:
        """Add a function, as a decorator."""
        self[function.__name__.removesuffix("_verb")] = function
        return function

    def runs(self, target: str) -> Callable[[Callable], Callable]:
        """Add a function that is nothing but signature and docstring.

        What its parameters are goes to `target`, MODULE:FUNCTION, in this order; it is imported when the verb runs.
        """

        def add(function: Callable) -> Callable:
            names = [*inspect.signature(function).parameters]

            @wraps(function)
            def verb(**given):
                module, _, name = target.partition(":")
                getattr(import_module(module), name)(*(given[one] for one in names))

            verb.target = target
            return self.verb(verb)

        return add

    def with_more(self, others: Iterable[Verbs]) -> Verbs:
        """These and the verbs of others; a group that both have gets the verbs of both."""
        every = Verbs(self.about, ends=self.ends, **self)
        for one in others:
            for name, verb in one.items():
                every[name] = every[name].with_more([verb]) if name in every else verb
        return every


@dataclass(frozen=True)
class FromFlags:
    """Said of a parameter that no flag gives: it is what a function makes of the flags in its own signature.

    Parameters
    ----------
    of : callable
        It is called before the verb, in the order of the verb's parameters.
    flags : callable, optional
        Gives the parameters where they are not those of the signature; called when the verb is asked for.
    """

    of: Callable
    flags: Callable[[], Iterable[inspect.Parameter]] | None = None

    def parameters(self) -> list[inspect.Parameter]:
        """The flags of which it is made."""
        return list(self.flags() if self.flags else inspect.signature(self.of, eval_str=True).parameters.values())


def in_flags(function: Callable) -> Callable:
    """A verb whose every parameter is a flag: those that are `FromFlags` are replaced by what they are made of."""
    flags, made = [], {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        maker = next(
            (one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, FromFlags)), None
        )
        parts = [parameter] if maker is None else maker.parameters()
        flags += [part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in parts]
        if maker:
            made[parameter.name] = maker.of, [part.name for part in parts]

    @wraps(function)
    def verb(**given):
        for name, (of, parts) in made.items():
            given[name] = of(**{part: given.pop(part) for part in parts})
        return function(**given)

    verb.__signature__ = inspect.Signature(flags)
    verb.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return verb


def installed() -> list[Verbs]:
    """What the installed packages add."""
    return [point.load() for point in sorted(found(GROUP), key=lambda point: point.name)]

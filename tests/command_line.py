"""The command line's verbs and flags, and the examples that the documentation shows of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvlab.cli.commands import Verbs
from kvlab.cli.parsing import command


def flags_of(verb) -> set[str]:
    """The flags that a verb has."""
    return {name for one in command("verb", verb).params for name in one.opts if name.startswith("-")}


def groups(verbs: Verbs, words: tuple[str, ...] = ()):
    """The command line's groups of verbs: their words, and the verbs that there are."""
    yield words, verbs
    for name, verb in verbs.items():
        if isinstance(verb, Verbs):
            yield from groups(verb, (*words, name))


def blocks(page: Path) -> Iterator[re.Match[str]]:
    """The blocks of code of a page: `kind`, `body`, and the `name` of the file that one is to be."""
    pattern = r"(?:`(?P<name>[\w.]+)`:\n\n)?```(?P<kind>\w+)\n(?P<body>.*?)```"
    return re.finditer(pattern, page.read_text(), re.DOTALL)


def examples(page: Path, python: Callable[[str], object]) -> Iterator[tuple[str, int, str]]:
    """What follows each `$` of a page, the exit code and the output that it shows, in the order of the page.

    On the way its files are written into the folder one stands in, and `python` is called with its blocks of Python.
    """
    for block in blocks(page):
        if block["name"]:
            Path(block["name"]).write_text(block["body"])
        if block["kind"] == "python":
            python(block["body"])
        for line, _, shown in (part.partition("\n") for part in block["body"].split("$ ")[1:]):
            if block["kind"] == "console":
                code = re.search(r"# exits (\d)", line)
                yield line, int(code[1]) if code else 0, shown

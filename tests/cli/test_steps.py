"""`kvlab step`: what the rules of the workflow type, and the functions that steps hand their flags to."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

from command_line import groups
from kvlab.cli import main as cli
from kvlab.cli.parsing import command

OTHER_NAMES = {  # what a function calls a parameter whose flag has another name
    "capture": {"asked_for": "asked"},
    "archive": {"asked_for": "asked"},
    "baseline": {"run": "name"},
    "choose": {"store": "folder"},
    "serving": {"model_dir": "model"},
    "load": {"model_dir": "model"},
}
TARGETS = {name: verb for _, verbs in groups(cli.verbs()) for name, verb in verbs.items() if hasattr(verb, "target")}


@pytest.mark.parametrize("name", TARGETS)
def test_a_function_gets_what_its_signature_asks_for(name):
    module, _, function = TARGETS[name].target.partition(":")
    wanted = inspect.signature(getattr(import_module(module), function)).parameters
    other = OTHER_NAMES.get(name, {})
    given = [other.get(one, one) for one in inspect.signature(TARGETS[name]).parameters]
    assert given == [one.removesuffix("_path") for one in wanted][: len(given)]
    assert all(one.default is not one.empty for one in [*wanted.values()][len(given) :])


def typed(root):
    """Every line that a rule types, with its rule's file."""
    for file in sorted((root / "workflow" / "rules").glob("*.smk")):
        for shell in re.findall(r'((?:\s*(?:"[^"\n]*"|\'[^\'\n]*\'))+)', file.read_text()):
            line = "".join(a or b for a, b in re.findall(r'"([^"\n]*)"|\'([^\'\n]*)\'', shell))
            if "python -m kvlab " in line:
                yield file.stem, line.partition("python -m kvlab ")[2].partition(" > ")[0]


def test_every_line_of_a_rule_names_flags_that_there_are_and_all_that_are_needed(root):
    lines = list(typed(root))
    assert len(lines) >= 30
    for file, line in lines:
        group, name, *rest = line.split()
        verb = command(name, cli.verbs()[group][name])
        known = {one.opts[0]: one for one in verb.params}
        flags = {word for word in rest if word.startswith("--")}
        needed = {flag for flag, one in known.items() if one.required and flag.startswith("--")}
        assert needed <= flags <= known.keys(), (file, line)
        places = [one for flag, one in known.items() if not flag.startswith("--")]
        assert bool(places) == (not rest[0].startswith("--")), (file, line)

"""The command line: what a person types, and how it ends. What a verb does is in the file of its name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from kvlab.cli import calibrate, coded, completion, evals, gate, measure, snapshot
from kvlab.cli.commands import MORE, Commands, installed
from kvlab.cli.flags import SUBJECT
from kvlab.cli.parsing import Parser, add_groups, add_verbs
from kvlab.core import parent_watch
from kvlab.core.errors import KvlabError
from kvlab.core.extras import missing_extra

ABOUT = """\
What compressing an LLM's KV cache costs: measured on your model, your text and your engine.

"""
OWN = Commands(
    """\
  measure     what codecs cost a model on a text: KL divergence, bits, speed; which to take
  calibrate   fit a codec to a model: one file for transformers, vLLM, encode and snapshot
  recipe      write the file that encode, decode and the drop-ins read
  encode      code the KV cache of a text into a file
  decode      a coded KV cache as safetensors
  inspect     check a coded KV cache and say what is in it
  snapshot    the KV cache of a context as a file: save, inspect, verify, restore, diff
  eval        a task of lm-evaluation-harness, plain and coded: evidence for the gate
  gate        which numbers may be published: check, query and more
  completion  complete verbs and flags in your shell: bash, zsh, fish
""",
    {
        measure.measure_verb: measure.FLAGS,
        calibrate.calibrate_verb: calibrate.FLAGS,
        evals.eval_verb: [*SUBJECT, *evals.FLAGS],
        completion.completion_verb: completion.FLAGS,
    }
    | coded.VERBS,
    {"snapshot": (snapshot.ABOUT, snapshot.VERBS), "gate": (gate.ABOUT, gate.VERBS)},
)
EXITS = """\
`kvlab VERB --help` says more. Exit codes: 0 done; 2 the input is wrong, 1 the run; a line says how.
"""


def parser() -> Parser:
    """The whole command line."""
    packages = [OWN, *installed(), *of_the_checkout()]
    root = Parser("kvlab", description=ABOUT)
    root.add_argument("--version", action=_Version)
    listed = root.group("".join([ABOUT, *(one.about for one in packages), EXITS]))
    for one in packages:
        add_verbs(listed, one.verbs)
    names = dict.fromkeys(name for one in packages for name in one.groups)
    add_groups(listed, {name: _group([one.groups[name] for one in packages if name in one.groups]) for name in names})
    return root


def _group(parts: Sequence) -> tuple:
    """One group of what several packages have of it: the first describes it, others add lines and verbs."""
    (about, verbs), *others = parts
    more = "".join(lines for lines, _ in others)
    return about.replace(MORE, more), {
        name: flags for one in (verbs, *(own for _, own in others)) for name, flags in one.items()
    }


def of_the_checkout() -> list[Commands]:
    """What ``validation/`` adds, which stands beside the packages in a checkout and is not installed."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "validation" / "verbs.py").is_file():
        return []
    sys.path.append(str(checkout))
    return [import_module("validation.verbs").COMMANDS]


class _Version(argparse.Action):
    """Print the version; it is looked up only when asked for."""

    def __init__(self, option_strings, dest, **_):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version")

    def __call__(self, parser, *_):
        from importlib.metadata import version

        print(f"kvlab {version('kvlab')}")
        parser.exit()


def main(arguments: list[str] | None = None) -> None:
    """Run one verb; errors become one line on stderr and an exit code."""
    whole = parser()
    args = whole.parse_args(arguments)
    args.whole = whole
    try:
        parent_watch.follow_run()
        if first := getattr(args, "first", None):
            first(args)
        if code := args.step(args):
            sys.exit(code)
    except KvlabError as error:
        _fail([f"{args.asked}: {line}" for line in getattr(error, "lines", (error,))], error.exit_code)
    except ModuleNotFoundError as error:
        if (said := missing_extra(error)) is None:
            raise
        _fail([f"{args.asked}: {said}"], said.exit_code)
    except BrokenPipeError:  # `kvlab params | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        from kvlab.core.records import storage_error

        where = error.filename or getattr(args, "out", None) or "."
        _fail([f"{args.asked}: {storage_error(Path(where), error)}"], 2)


def _fail(mistakes: Iterable[str], code: int) -> None:
    """Leave with a line for each mistake."""
    for mistake in mistakes:
        print(" ".join(mistake.split()), file=sys.stderr)
    sys.exit(code)

"""The command line: what a person types, and how it ends. What a verb does is in the file of its name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from kvlab.base import lifeline
from kvlab.base.errors import KvlabError
from kvlab.base.extras import missing_extra
from kvlab.cli import (
    calibrate,
    coded,
    completion,
    evals,
    gate,
    init,
    ledger,
    measure,
    params,
    simulate,
    snapshot,
    speculate,
    steps,
    witness,
)
from kvlab.cli.flags import SUBJECT
from kvlab.cli.parsing import Parser, Verbs, add_groups, add_verbs

ABOUT = """\
What compressing an LLM's KV cache costs: measured on your model, your text and your engine.

  measure     what codecs cost a model on a text: KL divergence, bits, speed; which to take
  witness     a result computed again, by other code
  calibrate   fit a codec to a model: one file for transformers, vLLM, encode and snapshot
  init        a params.yaml for your model, to study it as a whole
  params      check params.yaml and print it resolved, with the recipe ids
  recipe      write the file that encode, decode and the drop-ins read
  encode      code the KV cache of a text into a file
  decode      a coded KV cache as safetensors
  inspect     check a coded KV cache and say what is in it
  snapshot    the KV cache of a context as a file: save, inspect, verify, restore, diff
  eval        a task of lm-evaluation-harness, plain and coded: evidence for the gate
  speculate   how much of what a model drafts over its coded cache it accepts
  simulate    a service under load: what a smaller cache buys in answers that are in time
  gate        which numbers may be published: check, report, query and more
  ledger      what was made of what: verify the log, prove an entry, make a checkpoint
  step        the steps of the pipeline, as the workflow's rules call them; all: `make findings`
  completion  complete verbs and flags in your shell: bash, zsh, fish
"""
OF_THE_CHECKOUT = """\
  published   a published study's result files, analysed again
  bench       every codec's speed, size, error and KL divergence
"""
EXITS = """\
`kvlab VERB --help` says more. Exit codes: 0 done; 2 the input is wrong, 1 the run; a line says how.
"""


def parser() -> Parser:
    """The whole command line."""
    outside, outside_steps = of_the_checkout()
    root = Parser("kvlab", description=ABOUT)
    root.add_argument("--version", action=_Version)
    listed = root.group(ABOUT + (OF_THE_CHECKOUT if outside else "") + EXITS)
    single = {
        measure.measure_verb: measure.FLAGS,
        witness.witness_verb: witness.FLAGS,
        calibrate.calibrate_verb: calibrate.FLAGS,
        init.init_verb: init.FLAGS,
        params.params_verb: params.FLAGS,
        speculate.speculate_verb: speculate.FLAGS,
        simulate.simulate_verb: simulate.FLAGS,
        evals.eval_verb: [*SUBJECT, *evals.FLAGS],
        completion.completion_verb: completion.FLAGS,
    }
    add_verbs(listed, single | coded.VERBS | outside)
    about_steps = steps.ABOUT.format(checkout=steps.OF_THE_CHECKOUT if outside_steps else "")
    add_groups(
        listed,
        {
            "snapshot": (snapshot.ABOUT, snapshot.VERBS),
            "gate": (gate.ABOUT, gate.VERBS),
            "ledger": (ledger.ABOUT, ledger.VERBS),
            "step": (about_steps, steps.VERBS | outside_steps),
        },
    )
    return root


def of_the_checkout() -> tuple[Verbs, Verbs]:
    """The verbs and the steps of ``validation/``, which stands beside the package in a checkout, not installed."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "validation" / "verbs.py").is_file():
        return {}, {}
    sys.path.append(str(checkout))
    verbs = import_module("validation.verbs")
    return verbs.VERBS, verbs.STEPS


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
        lifeline.follow_run()
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
        from kvlab.base.records import storage_error

        where = error.filename or getattr(args, "out", None) or "."
        _fail([f"{args.asked}: {storage_error(Path(where), error)}"], 2)


def _fail(mistakes: Iterable[str], code: int) -> None:
    """Leave with a line for each mistake."""
    for mistake in mistakes:
        print(" ".join(mistake.split()), file=sys.stderr)
    sys.exit(code)

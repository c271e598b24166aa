"""What the mechanisms add to the command line; each verb is in the file of its name."""

from __future__ import annotations

from kvlab.cli.commands import Commands
from kvlab_mechanisms.cli import simulate, speculate

COMMANDS = Commands(
    """\
  speculate   how much of what a model drafts over its coded cache it accepts
  simulate    a service under load: what a smaller cache buys in answers that are in time
""",
    {speculate.speculate_verb: speculate.FLAGS, simulate.simulate_verb: simulate.FLAGS},
)

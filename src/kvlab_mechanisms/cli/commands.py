"""What the mechanisms add to the command line; each verb is in the file of its name."""

from __future__ import annotations

from kvlab.cli.commands import Verbs
from kvlab_mechanisms.cli.simulate import simulate_verb
from kvlab_mechanisms.cli.speculate import speculate_verb

COMMANDS = Verbs("", speculate_verb, simulate_verb)

"""What the pipeline adds to the command line in a checkout; each verb is in the file of its name."""

from __future__ import annotations

from kvlab.cli.commands import Verbs
from kvlab_pipeline.cli.gate_page import REPORT
from kvlab_pipeline.cli.init import init_verb
from kvlab_pipeline.cli.ledger import LEDGER
from kvlab_pipeline.cli.params import params_verb
from kvlab_pipeline.cli.steps import STEPS
from kvlab_pipeline.cli.witness import witness_verb

COMMANDS = Verbs("", init_verb, params_verb, witness_verb, ledger=LEDGER, step=STEPS, gate=REPORT)

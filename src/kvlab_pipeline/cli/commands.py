"""What the pipeline adds to the command line in a checkout; each verb is in the file of its name."""

from __future__ import annotations

from kvlab.cli.commands import Commands
from kvlab_pipeline.cli import gate_page, init, ledger, params, steps, witness

COMMANDS = Commands(
    """\
  init        a params.yaml for your model, to study it as a whole
  params      check params.yaml and print it resolved, with the recipe ids
  witness     a result computed again, by other code
  ledger      what was made of what: verify the log, prove an entry, make a checkpoint
  step        the steps of the pipeline, as the workflow's rules call them; all: `make findings`
""",
    {
        init.init_verb: init.FLAGS,
        params.params_verb: params.FLAGS,
        witness.witness_verb: witness.FLAGS,
    },
    {
        "ledger": (ledger.ABOUT, ledger.VERBS),
        "step": (steps.ABOUT, steps.VERBS),
        "gate": (gate_page.ABOUT, gate_page.VERBS),
    },
)

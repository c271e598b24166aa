"""The verbs of a checkout: `kvlab step`, `params`, `init`, `ledger`, `witness`, `gate report` and `replay`."""

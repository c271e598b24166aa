"""The verbs of the mechanisms: `kvlab simulate` and `kvlab speculate`."""

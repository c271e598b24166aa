"""`kvlab VERB`: the verbs, their flags, and how it ends."""

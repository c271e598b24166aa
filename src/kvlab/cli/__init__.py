"""The command line: its verbs, their flags, and how it ends."""

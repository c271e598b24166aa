"""Text that a JSON schema allows: a reference automaton over bytes, its token masks, and xgrammar."""

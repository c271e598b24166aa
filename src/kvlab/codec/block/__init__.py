"""`block`: the published codec, one stage of its signal chain per file."""

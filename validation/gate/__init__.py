"""How far the gate can be trusted: what it finds of planted corruptions, beside what the published rules find."""

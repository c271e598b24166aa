"""Which cache format to take in the engine that one runs: formats by engine, verdicts, the choice, lines to paste."""

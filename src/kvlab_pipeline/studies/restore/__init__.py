"""What a restore from a snapshot saves, what it costs, and whether it can be told from a cold run."""

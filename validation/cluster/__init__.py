"""What it takes to work on one model in several processes on this machine: bytes, microseconds, equal answers."""

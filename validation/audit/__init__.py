"""Faults planted in the running chain and in its files, each in a process of its own: what catches them, and when."""

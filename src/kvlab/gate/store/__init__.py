"""Measured rows kept in one SQLite file, with what the gate said of them, and questions to it."""

from kvlab.gate.store.database import Store, StoreLocked, open_store

__all__ = ["Store", "StoreLocked", "open_store"]

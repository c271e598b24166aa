"""Measured rows kept in one SQLite file, with what the gate said of them, and questions to it."""

from kvlab.gate.store.database import RowStore, StoreLocked, open_store

__all__ = ["RowStore", "StoreLocked", "open_store"]

"""Findings that are kept: what was measured once under an identity is not measured under that identity again.

A finding belongs to a subject, a window, and everything else that decides it (`Engines.identity`). Each of the three
is named in full and addressed by the sha256 of its canonical JSON: whatever differs in one field is another address.
The store holds nothing that cannot be measured again; it can be deleted at any time.

Files: ``<digest of what is shared>/<random>.parquet`` with the scored tokens and ``.json`` with the rest, written after
each window, the JSON last. A pack without its JSON, or with a table of another digest, counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from kvlab.core.recipe import canonical
from kvlab.core.records import TOKENS, file_hash, finite, write_json, write_table

VERSION = 1  # of the files
ROWS = pl.Schema({name: dtype for name, dtype in TOKENS.items() if name not in ("cell_id", "window")})


class Found(NamedTuple):
    """What was found of one subject on one window.

    Parameters
    ----------
    note : dict
        Plain data (it is kept as JSON): counts, bytes, seconds, scores.
    rows : polars.DataFrame or None
        The scored tokens, as `ROWS`.
    """

    note: dict
    rows: pl.DataFrame | None = None


class Lost(Exception):
    """A pack that is not whole."""


@dataclass
class ResultStore:
    """Findings under one shared identity, in memory and, given a folder, on disk.

    Parameters
    ----------
    folder : Path or None
        Where all stores lie; None keeps nothing beyond this process.
    shared : dict
        What decides every finding, beside its subject and its window.
    current : callable, optional
        Names the state of the code that measures, None where it cannot be known. When it is not what it was when this
        store was opened, nothing more is kept: the subjects' identities may no longer be true.
    """

    folder: Path | None
    shared: dict
    current: Callable[[], str | None] | None = None
    _identities: dict[str, dict] = field(default_factory=dict)
    _held: dict[tuple[str, str], Found] = field(default_factory=dict)

    def __post_init__(self):
        self._began = self.current() if self.current else None
        if self.folder is None:
            return
        self.folder = Path(self.folder) / address({"version": VERSION, "shared": self.shared})[:32]
        for path in sorted(self.folder.glob("*.json")):
            try:
                self._held |= self._read(path)
            except Lost:
                continue

    def key(self, subject: Any) -> str:
        """The address of a subject's identity; a subject without one is equal to no other and is not kept."""
        identity = subject.identity()
        if identity is None:
            return f"unkept {id(subject)}"
        self._identities[name := address(identity)] = identity
        return name

    def get(self, key: str, window: Any) -> Found | None:
        """What is kept of a subject on a window."""
        return self._held.get((key, window.identity))

    def put(self, window: Any, fresh: dict[str, Found]) -> None:
        """Keep what was found on a window."""
        kept = {key: found for key, found in fresh.items() if key in self._identities}
        for found in kept.values():
            if found.rows is not None:
                finite(found.rows, f"window {window.number} of {window.text}")
        self._held |= {(key, window.identity): found for key, found in kept.items()}
        if kept and self.folder is not None and self._known():
            self._write(window, kept)

    def _known(self) -> bool:
        """Whether the code that measures is still the one that the identities name."""
        return self.current is None or (self._began is not None and self.current() == self._began)

    def _write(self, window: Any, kept: dict[str, Found]) -> None:
        path = self.folder / f"{uuid.uuid4().hex}.json"
        tables = [rows.with_columns(key=pl.lit(key)) for key, (_, rows) in kept.items() if rows is not None]
        empty = pl.DataFrame(schema=ROWS | {"key": pl.String})
        write_table(path.with_suffix(".parquet"), pl.concat(tables) if tables else empty)
        pack = {
            "shared": self.shared,
            "window": window.identity,
            "table": file_hash(path.with_suffix(".parquet")),
            "found": [
                {"subject": self._identities[key], "note": note, "rows": 0 if rows is None else len(rows)}
                for key, (note, rows) in kept.items()
            ],
        }
        pack = json.loads(canonical(pack))
        write_json(path, pack | {"digest": address(pack)})

    def _read(self, path: Path) -> dict[tuple[str, str], Found]:
        """The findings of one pack; `Lost` unless it is whole and says of itself what its address says."""
        try:
            pack = json.loads(path.read_text())
            digest = pack.pop("digest")
            table = pl.read_parquet(path.with_suffix(".parquet"))
            whole = digest == address(pack) and pack["table"] == file_hash(path.with_suffix(".parquet"))
            same = canonical(pack["shared"]) == canonical(self.shared)
        except (OSError, ValueError, KeyError, AttributeError, pl.exceptions.PolarsError) as error:
            raise Lost(f"{path}: {error}") from None
        if not (whole and same) or table.schema != ROWS | {"key": pl.String}:
            raise Lost(str(path))
        rows = {key: part.drop("key") for (key,), part in table.group_by("key", maintain_order=True)}
        found = {}
        for one in pack["found"]:
            key = address(one["subject"])
            found[key, pack["window"]] = Found(one["note"], rows[key] if one["rows"] else None)
        return found


def address(identity: dict) -> str:
    """The sha256 of an identity's canonical JSON."""
    return hashlib.sha256(canonical(identity).encode()).hexdigest()

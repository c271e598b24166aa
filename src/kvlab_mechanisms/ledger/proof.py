"""A proof that an entry is in the log, for whoever has the checkpoint and not the log."""

from __future__ import annotations

from pathlib import Path

from kvlab.codecs.stream.tree import leaf
from kvlab.core.errors import StorageError
from kvlab.core.records import read_json, write_json
from kvlab_mechanisms.ledger.checkpoint import Checkpoint, LedgerBroken
from kvlab_mechanisms.ledger.jobs import number_of
from kvlab_mechanisms.ledger.log import SHA256, LogEntry, ReadLog, decoded
from kvlab_mechanisms.ledger.merkle import Tree, proves_inclusion


def write(path: Path | str, found: ReadLog, tree: Tree, file: str, size: int) -> int:
    """Write the proof of the entry that made a file, in the log of `size`; returns the entry's number."""
    number = number_of(found.entries()[:size], file)
    steps = [one.hex() for one in tree.inclusion(number, size)]
    write_json(path, {"entry": found.lines[number].decode(), "number": number, "size": size, "path": steps})
    return number


def read(path: Path | str, checkpoint: Checkpoint) -> LogEntry:
    """The entry that a file proves to be in the log of a checkpoint.

    Raises
    ------
    StorageError
        The file is no proof.
    LedgerBroken
        It is one of another log, or of another size of this one, or it proves nothing.
    """
    said = read_json(path)
    if not _is_proof(said):
        raise StorageError(f"{path} is no proof; `kvlab ledger prove` writes one")
    if said["size"] != checkpoint.size:
        raise LedgerBroken(f"{path} is of a log of {said['size']} entries, the checkpoint of {checkpoint.size}")
    line, steps = said["entry"].encode(), [bytes.fromhex(step) for step in said["path"]]
    if not proves_inclusion(leaf(line), said["number"], said["size"], bytes.fromhex(checkpoint.root), steps):
        raise LedgerBroken(f"{path} does not prove its entry to be in the log of the checkpoint")
    return decoded(line, str(path))


def _is_proof(said: object) -> bool:
    numbers = isinstance(said, dict) and all(type(said.get(name)) is int for name in ("number", "size"))
    if not numbers or said.keys() != {"entry", "number", "size", "path"} or not isinstance(said["entry"], str):
        return False
    if not said["entry"].isascii():  # as every entry is
        return False
    steps = said["path"]
    return isinstance(steps, list) and all(isinstance(one, str) and SHA256.fullmatch(one) for one in steps)

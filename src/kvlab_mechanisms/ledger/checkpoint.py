"""What the log was at some time, small enough for git: its size and its root, and who vouches for them.

The checkpoint lies outside the log and is kept with the history of the code: whoever cuts, swaps, edits or takes
entries out of the log has to change the past of the repository too. A signature is that of sealed caches.
"""

from __future__ import annotations

import hmac
from dataclasses import asdict, dataclass
from pathlib import Path

from kvlab.codecs.stream.seal import Key
from kvlab.core.errors import Fault, StorageError, UserError
from kvlab.core.records import read_json, write_json
from kvlab_mechanisms.ledger.log import FOLDER, SHA256, ReadLog
from kvlab_mechanisms.ledger.merkle import Tree

CHECKPOINT = FOLDER / "checkpoint.json"
PURPOSE = b"kvlab ledger"


class LedgerBroken(Fault):
    """The log is not the one that a checkpoint was made of, or not a log of results any more."""

    code = "ledger"


@dataclass(frozen=True)
class Checkpoint:
    """The first `size` entries of a log.

    Parameters
    ----------
    size : int
    root : str
        64 hexadecimal digits.
    signature : str
        HMAC-SHA-256 of both, 64 hexadecimal digits; empty without a key.
    """

    size: int
    root: str
    signature: str = ""

    def __post_init__(self):
        texts = isinstance(self.root, str) and isinstance(self.signature, str)
        right = texts and SHA256.fullmatch(self.root) and SHA256.fullmatch(self.signature or self.root)
        if not right or type(self.size) is not int or self.size < 0:
            raise StorageError("a checkpoint has a size of at least 0, a root and a signature of 64 digits, or none")

    @classmethod
    def of(cls, tree: Tree, key: Key | None = None) -> Checkpoint:
        """The whole tree."""
        size, root = len(tree), tree.root()
        return cls(size, root.hex(), key.signature(_purpose(size), root).hex() if key else "")

    @classmethod
    def read(cls, path: Path | str) -> Checkpoint:
        """What lies in a file; `StorageError` for anything else than a checkpoint."""
        data = read_json(path)
        if not isinstance(data, dict) or not {"size", "root"} <= data.keys() <= {"size", "root", "signature"}:
            raise StorageError(f"{path} is no checkpoint; `kvlab ledger checkpoint` writes one")
        try:
            return cls(**data)
        except StorageError as error:
            raise StorageError(f"{path}: {error}") from None

    def write(self, path: Path | str) -> None:
        """Write it, atomically."""
        write_json(path, {name: value for name, value in asdict(self).items() if name != "signature" or value})

    def refuse_unsigned(self, key: Key) -> None:
        """`LedgerBroken` unless it was signed with this key."""
        wanted = key.signature(_purpose(self.size), bytes.fromhex(self.root)).hex()
        if not hmac.compare_digest(wanted, self.signature):
            raise LedgerBroken("the checkpoint is not signed with this key", code="ledger.signature")


def _purpose(size: int) -> bytes:
    return PURPOSE + size.to_bytes(8, "big")


def verify(found: ReadLog, checkpoint: Checkpoint | None) -> Tree:
    """Hold a log against what it was, and every line against what a line is.

    Raises
    ------
    LedgerBroken
        It is shorter than the checkpoint, or does not begin with the same entries.
    StorageError
        A line is no entry.
    """
    tree = found.tree()
    if checkpoint and len(tree) < checkpoint.size:
        raise LedgerBroken(
            f"{found.path} has {len(tree)} entries, the checkpoint {checkpoint.size}: its end was cut",
            code="ledger.cut",
        )
    if checkpoint and tree.root(checkpoint.size).hex() != checkpoint.root:
        raise LedgerBroken(
            f"the first {checkpoint.size} entries of {found.path} are not those of the checkpoint: an entry was"
            " changed, moved, put in or taken out; look for the log of then in backups and other clones",
            code="ledger.other-entries",
        )
    found.entries()
    return tree


def advance(found: ReadLog, old: Checkpoint | None, key: Key | None = None) -> Checkpoint:
    """The checkpoint of a log as it is, which goes on from the old one; raises as `verify` does."""
    if found.torn:
        raise UserError(
            f"{found.path} ends amid a line, of {found.torn} bytes; the next job that ends takes it away",
            code="user.torn-line",
        )
    return Checkpoint.of(verify(found, old), key)

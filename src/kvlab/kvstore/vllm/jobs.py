"""What the connector's two halves say to one another: what is to be loaded and saved in a step, and what came of it.

vLLM carries both, between processes where it has several, so all of it can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvlab.kvstore.snapshot.numerics import PREFILL
from kvlab.kvstore.snapshot.reasons import SnapshotReason


@dataclass(frozen=True)
class Load:
    """Put a snapshot's K and V into a request's blocks.

    Parameters
    ----------
    request : str
        Its id.
    path : Path
        The snapshot.
    tokens : list of int
        From the sequence's first on, all those that the snapshot is to serve: whole chunks.
    begin : int
        How many of them vLLM's own cache holds already; they are left alone.
    salt : str or None
        The request's own.
    block_ids : list of int
        The request's, from its first token on.
    """

    request: str
    path: Path
    tokens: list[int]
    begin: int
    salt: str | None
    block_ids: list[int]


@dataclass(frozen=True)
class Save:
    """Write the K and V of a request's first tokens, whole chunks; the fields are those of `Load`.

    `computed` goes into the manifest, see `kvlab.kvstore.snapshot.numerics`. `last` is set where vLLM keeps the blocks
    of a request that has ended until they have been read.
    """

    request: str
    path: Path
    tokens: list[int]
    salt: str | None
    block_ids: list[int]
    computed: str = PREFILL
    last: bool = False


@dataclass
class StepJobs(KVConnectorMetadata):
    """What is to be done in one step of the engine: loads before the forward pass, saves after it."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(frozen=True)
class JobOutcome:
    """What came of a job.

    Parameters
    ----------
    path : Path
        The snapshot.
    tokens : int
        That were loaded into the cache, or saved; 0 when it failed.
    nbytes : int or None
        Of the file; None when it failed.
    ms : float or None
        Milliseconds; None when it failed.
    reasons : tuple of SnapshotReason
        Why it failed, empty when it did not.
    """

    path: Path
    tokens: int
    nbytes: int | None
    ms: float | None
    reasons: tuple[SnapshotReason, ...] = ()

    @classmethod
    def failed(cls, path: Path, reasons: tuple[SnapshotReason, ...]) -> JobOutcome:
        """That of a job which changed nothing that counts."""
        return cls(path, 0, None, None, reasons)


@dataclass
class Outcomes(KVConnectorWorkerMetadata):
    """What came of a step's jobs, by request."""

    loads: dict[str, JobOutcome] = field(default_factory=dict)
    saves: dict[str, JobOutcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several workers; there is one, as `context_of` sees to."""
        return Outcomes(self.loads | other.loads, self.saves | other.saves)


@dataclass
class WorkerCounts:
    """What a worker has done since it was started.

    Parameters
    ----------
    loads, saves : int
        That succeeded.
    tokens_loaded, tokens_saved : int
        Put into vLLM's cache, and read from it.
    bytes_read, bytes_written : int
        Of the files.
    load_ms, save_ms : float
        Milliseconds, checksums and disk included.
    failed : dict of str to int
        How often each reason stood against a load or a save.
    """

    loads: int = 0
    tokens_loaded: int = 0
    bytes_read: int = 0
    load_ms: float = 0.0
    saves: int = 0
    tokens_saved: int = 0
    bytes_written: int = 0
    save_ms: float = 0.0
    failed: dict[str, int] = field(default_factory=dict)

    def loaded(self, outcome: JobOutcome) -> None:
        """Count a load."""
        self._count(outcome, "loads", "tokens_loaded", "bytes_read", "load_ms")

    def saved(self, outcome: JobOutcome) -> None:
        """Count a save."""
        self._count(outcome, "saves", "tokens_saved", "bytes_written", "save_ms")

    def __sub__(self, other: WorkerCounts) -> WorkerCounts:
        """What was done between two looks."""
        ours, theirs = self.failed, other.failed
        failed = {code: n for code in ours if (n := ours[code] - theirs.get(code, 0))}
        numbers = [f.name for f in fields(self) if f.name != "failed"]
        return WorkerCounts(**{name: getattr(self, name) - getattr(other, name) for name in numbers}, failed=failed)

    def _count(self, outcome: JobOutcome, jobs: str, tokens: str, nbytes: str, ms: str) -> None:
        for code, _ in outcome.reasons:
            self.failed[str(code)] = self.failed.get(str(code), 0) + 1
        if not outcome.reasons:
            found = {jobs: 1, tokens: outcome.tokens, nbytes: outcome.nbytes, ms: outcome.ms}
            for name, more in found.items():
                setattr(self, name, getattr(self, name) + more)

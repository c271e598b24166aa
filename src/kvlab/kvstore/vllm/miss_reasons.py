"""Why a request is computed from its first token on, or is not saved."""

from __future__ import annotations

from enum import StrEnum

from kvlab.core.errors import CalibrationMismatch, CapabilityError, KvlabError, NonFinite, SnapshotRefused
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason


class MissReason(StrEnum):
    """Why a request is computed from its first token on, beside what speaks against a snapshot."""

    UNWANTED = "unwanted"
    NOT_TOKENS = "not_tokens"
    PROMPT_LOGPROBS = "prompt_logprobs"
    TOO_SHORT = "too_short"
    NO_SNAPSHOT = "no_snapshot"
    PREFIX_CACHED = "prefix_cached"
    STORAGE = "storage"
    LOAD_FAILED = "load_failed"
    LOSSY = "lossy"
    UNCODED = "uncoded"


DAMAGE = frozenset({
    Code.NOT_A_SNAPSHOT, Code.UNKNOWN_VERSION, Code.HEADER_SHORT, Code.HEADER_CHECKSUM, Code.HEADER_COUNTS,
    Code.TRUNCATED, Code.TRAILING_BYTES, Code.MANIFEST_CHECKSUM, Code.MANIFEST_INVALID, Code.INDEX_CHECKSUM,
    Code.INDEX_INVALID, Code.TOKENS_CHECKSUM, Code.CHAIN_BROKEN, Code.INCONSISTENT, Code.CHUNK_CHECKSUM,
    Code.CHUNK_UNDECODABLE, Code.FILE_HASH,
})  # fmt: skip
"""What a file that was good when it was chosen shows when its bytes have changed: the next load will fail too."""


def reasons_of(error: KvlabError) -> tuple[SnapshotReason, ...]:
    """The reasons that an error carries, or the error itself as one."""
    if isinstance(error, SnapshotRefused):
        return error.reasons
    of_coder = isinstance(error, CapabilityError | CalibrationMismatch | NonFinite)
    return (SnapshotReason(MissReason.UNCODED if of_coder else MissReason.STORAGE, str(error)),)

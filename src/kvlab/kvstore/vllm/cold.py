"""Why a request is computed from its first token on, or is not saved."""

from __future__ import annotations

from enum import StrEnum

from kvlab.errors import KvlabError, SnapshotRefused
from kvlab.kvstore.snapshot.reasons import Reason


class Cold(StrEnum):
    """Why a request is computed from its first token on, beside what speaks against a snapshot."""

    UNWANTED = "unwanted"
    NOT_TOKENS = "not_tokens"
    PROMPT_LOGPROBS = "prompt_logprobs"
    TOO_SHORT = "too_short"
    NO_SNAPSHOT = "no_snapshot"
    PREFIX_CACHED = "prefix_cached"
    STORAGE = "storage"
    LOAD_FAILED = "load_failed"


def reasons_of(error: KvlabError) -> tuple[Reason, ...]:
    """The reasons that an error carries, or the error itself as one."""
    if isinstance(error, SnapshotRefused):
        return error.reasons
    return (Reason(Cold.STORAGE, str(error)),)

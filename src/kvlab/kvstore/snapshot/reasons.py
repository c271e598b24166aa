"""Why a snapshot is not used: a code for every kind of trouble, and one line that says what was found."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvlab.core.errors import SnapshotRefused


class Code(StrEnum):
    """What is wrong, in one word for programs and tests; no two troubles share one."""

    NO_SNAPSHOT = "no_snapshot"  # none was given, or the folder is empty
    UNREADABLE = "unreadable"  # no file, or none that may be read
    # the file's first bytes
    NOT_A_SNAPSHOT = "not_a_snapshot"
    PUBLISHED_LAYOUT = "published_layout"
    UNKNOWN_VERSION = "unknown_version"
    HEADER_SHORT = "header_short"
    HEADER_CHECKSUM = "header_checksum"
    HEADER_COUNTS = "header_counts"
    # its length
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    # its sections
    MANIFEST_CHECKSUM = "manifest_checksum"
    MANIFEST_INVALID = "manifest_invalid"
    INDEX_CHECKSUM = "index_checksum"
    INDEX_INVALID = "index_invalid"
    TOKENS_CHECKSUM = "tokens_checksum"
    CHAIN_BROKEN = "chain_broken"
    INCONSISTENT = "inconsistent"
    CHUNK_CHECKSUM = "chunk_checksum"
    CHUNK_UNDECODABLE = "chunk_undecodable"
    FILE_HASH = "file_hash"
    # who made it, where a key was given
    UNSIGNED = "unsigned"
    SIGNATURE = "signature"
    # whose it is
    MODEL = "model"
    CONFIG = "config"
    ROPE = "rope"
    TOKENIZER = "tokenizer"
    DTYPE = "dtype"
    LAYOUT = "layout"
    CODEC = "codec"
    CALIBRATION = "calibration"
    SALT = "salt"
    UNPROVEN = "unproven"
    PREFIX = "prefix"
    # the published layout only
    V1_MAGIC = "v1_magic"
    V1_BYTE_ORDER = "v1_byte_order"
    V1_HEADER_SHORT = "v1_header_short"
    V1_COUNT = "v1_count"
    V1_CHUNK_TOKENS = "v1_chunk_tokens"
    V1_KV_HEADS = "v1_kv_heads"
    V1_K_SEGMENT = "v1_k_segment"
    V1_V_SEGMENT = "v1_v_segment"
    V1_CHUNK_BYTES = "v1_chunk_bytes"
    V1_DTYPE = "v1_dtype"
    V1_NO_LEDGER = "v1_no_ledger"
    V1_LEDGER = "v1_ledger"
    V1_TRUNCATED = "v1_truncated"
    V1_TRAILING_BYTES = "v1_trailing_bytes"


class SnapshotReason(NamedTuple):
    """One thing that speaks against using a snapshot."""

    code: Code
    message: str


def refusal(code: Code, message: str) -> SnapshotRefused:
    """The error of a single reason, to be raised."""
    return SnapshotRefused([SnapshotReason(code, message)])

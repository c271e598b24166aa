"""Why a request was not restored or not saved, by the error that stood against it."""

from __future__ import annotations

import pytest

from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite, SnapshotRefused, StorageError
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason
from kvlab.kvstore.vllm.miss_reasons import MissReason, reasons_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageError("the disk is full"), MissReason.STORAGE),
        (CapabilityError("the bits cannot be met"), MissReason.UNCODED),
        (CalibrationMismatch("what decodes alone"), MissReason.UNCODED),
        (NonFinite("layer 0 k"), MissReason.UNCODED),
    ],
)
def test_an_error_is_a_reason_of_its_kind(error, code):
    assert reasons_of(error) == (SnapshotReason(code, str(error)),)


def test_a_refused_snapshot_keeps_its_reasons():
    reasons = (SnapshotReason(Code.MODEL, "another"), SnapshotReason(Code.SALT, "another"))
    assert reasons_of(SnapshotRefused(reasons)) == reasons

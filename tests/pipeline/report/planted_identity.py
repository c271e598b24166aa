"""The identity that everything planted shares."""

from __future__ import annotations

from kvlab.core.records import Provenance

SIGMAS = {"hf": "a" * 16, "vllm": "b" * 16}  # hashes, by whose capture they were fitted on
VERSIONS = {"kvlab": "0.1.0", "python": "3.11"}


def provenance(**changes) -> Provenance:
    values = {
        "model": "reference",
        "model_hash": "5" * 16,
        "corpus_hash": "c" * 16,
        "calibration": SIGMAS,
        "versions": VERSIONS,
        "device": "cpu",
    }
    return Provenance(**values | changes)

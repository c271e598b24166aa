"""The parameters of the embedded model, changed where a test needs it."""

from __future__ import annotations

import embedded
from kvlab.core.paramfile import overlay
from kvlab_pipeline.studies.settings import Settings

# What no report reads: small enough for every corpus that a test makes up.
FEWER = {
    "kvstore": {
        "restore": {"chunk_tokens": 8, "prompts": 1, "lengths": [32], "suffix": 8},
        "bitplanes": {"windows": 2},
        "placement": {"windows": 1},
        "policy": {"needles": 2},
    }
}


def shipped(*changes: dict) -> Settings:
    """Those parameters with `changes` (nested dicts) laid over them one after another."""
    data = embedded.document()
    del data["models"]
    data["model"] = embedded.settings().model.model_dump(mode="json")
    for change in (FEWER, *changes):
        data = overlay(data, change)
    return Settings.complete(data)

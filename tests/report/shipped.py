"""The repository's own parameters, changed where a test needs it."""

from __future__ import annotations

from pathlib import Path

from kvlab.base.paramfile import overlay, read_yaml
from kvlab.studies.settings import Settings, by_model

# What no report reads: small enough for every corpus that a test makes up.
FEWER = {
    "kvstore": {
        "restore": {"chunk_tokens": 8, "prompts": 1, "lengths": [32], "suffix": 8},
        "bitplanes": {"windows": 2},
        "placement": {"windows": 1},
        "policy": {"needles": 2},
    }
}
PARAMS = Path(__file__).resolve().parents[2] / "params.yaml"


def shipped(*changes: dict) -> Settings:
    """params.yaml for the first model that it lists, with `changes` (nested dicts) laid over it one after another."""
    data = read_yaml(PARAMS)
    model = next(iter(by_model(data).values())).model.model_dump(mode="json")
    data = {key: value for key, value in data.items() if key != "models"} | {"model": model}
    for change in (FEWER, *changes):
        data = overlay(data, change)
    return Settings.complete(data)

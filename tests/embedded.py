"""Parameters that tests begin with: the preset of the embedded model: every study, nothing downloaded."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path

import yaml

from kvlab.core.paramfile import preset, read_yaml
from kvlab_pipeline.studies.settings import Settings, by_model

ROOT = Path(__file__).resolve().parent.parent
NAME = "reference"


def document() -> dict:
    """params.yaml with the preset laid over it, as a mapping of one's own."""
    return copy.deepcopy(_read())


@functools.cache
def _read() -> dict:
    with contextlib.chdir(ROOT):
        return preset(NAME, read_yaml(Path("params.yaml")))


def text() -> str:
    """The same as the text of a params.yaml."""
    return yaml.safe_dump(document(), sort_keys=False)


@functools.cache
def settings() -> Settings:
    """The parameters of the embedded model, of every section."""
    with contextlib.chdir(ROOT):
        (found,) = by_model(document()).values()
    return found

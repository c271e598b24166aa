"""Where a model's weights come from, when that must be told with every number of it: ``origin.json`` in its folder."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field, ValidationError

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import ModelError
from kvlab.core.wheels import WheelFile

ORIGIN = "origin.json"
SHA256 = "^[0-9a-f]{64}$"


class GgufPart(Frozen):
    """A part of a GGUF file: a file of a wheel, which is known by its hash."""

    distribution: str
    version: str
    wheel_sha256: str = Field(pattern=SHA256)
    path: str


class Gguf(Frozen):
    """A GGUF file: its hash, and the parts that it is put together from, in order."""

    sha256: str = Field(pattern=SHA256)
    parts: list[GgufPart] = Field(min_length=1)

    @property
    def wheel_files(self) -> list[WheelFile]:
        """The parts, as they are read."""
        return [WheelFile(**part.model_dump()) for part in self.parts]


class Origin(Frozen):
    """What a model's weights are.

    Parameters
    ----------
    disclosure : str
        What the weights are, in a sentence.
    licence : str
        Of the weights, by its SPDX name where it has one.
    terms : str or None
        What who makes the weights has to know of their use.
    by_name : bool
        Whether they are made only where somebody names the model: for `kvlab weights`, or in params.yaml.
    gguf : Gguf or None
        What the weights are made from, on this machine; None where they lie in the folder.
    files : dict of str to str
        What is made, by name, and its `kvlab.core.records.file_hash`.
    """

    disclosure: str
    licence: str
    terms: str | None = None
    by_name: bool = False
    gguf: Gguf | None = None
    files: dict[str, str] = Field(default_factory=dict)

    @property
    def told(self) -> str:
        """What stands wherever a number of this model is printed: the disclosure, and the licence."""
        return f"{self.disclosure} Licence: {self.licence}."


def read_origin(folder: Path) -> Origin | None:
    """What a model's folder says of its weights; None where it says nothing."""
    path = folder / ORIGIN
    if not path.is_file():
        return None
    try:
        return Origin.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        raise ModelError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None


def told_of(folder: Path) -> str | None:
    """`Origin.told` of a model's folder; None where that says nothing of its weights."""
    origin = read_origin(folder)
    return origin and origin.told

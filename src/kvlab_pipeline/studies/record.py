"""The JSON that a study's job leaves: what all have, and how one is read. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import StorageError
from kvlab.core.records import Provenance, read_json

Kind = TypeVar("Kind", bound=Frozen)


class StudyRecord(Frozen):
    """What a study of a model leaves; its own results are further fields."""

    provenance: Provenance

    @property
    def model(self) -> str:
        """Slug of the model."""
        return self.provenance.model


def read_record(path: Path | str, kind: type[Kind], step: str) -> Kind:
    """The record that ``kvlab step STEP`` wrote; `StorageError` when the file is missing or of another kind."""
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise StorageError(
            f"{path} is no record of `kvlab step {step}`: {place}: {problem['msg']}", code="storage.no-record"
        ) from None

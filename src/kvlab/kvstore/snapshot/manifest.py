"""The manifest of a snapshot: what it is, in canonical JSON.

What there is per chunk or per token lies in sections of its own, see `format`.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field, ValidationError

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import KvlabError, UserError
from kvlab.core.recipe import ID_LENGTH, canonical
from kvlab.kvstore.snapshot.format import MAX_MANIFEST
from kvlab.kvstore.snapshot.identity import ContextIdentity
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason, refusal

EvidenceId = Annotated[str, Field(pattern=f"^[0-9a-f]{{{ID_LENGTH}}}$")]


class Manifest(Frozen):
    """What a snapshot says of itself.

    Parameters
    ----------
    identity : ContextIdentity
        Whose K and V it holds, and how they are stored.
    length : int
        Tokens, whole chunks only.
    clock : int
        The ledger's.
    evidence : tuple of str
        Ids of the gate's evidence of what a lossy payload costs; empty where there is none.
    made : dict of str to str
        What wrote it: versions of the packages, and what the caller adds, such as the engine. It keeps no snapshot
        from being used, and says whether what follows it is a cold run's to the bit, see `numerics`.
    """

    identity: ContextIdentity
    length: int = Field(ge=1)
    clock: int = Field(ge=0)
    evidence: tuple[EvidenceId, ...] = ()
    made: dict[str, str] = Field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        """Whether the payload gives back the very bits that attention read."""
        return self.identity.codec is None or self.identity.codec.lossless

    def unproven(self) -> list[SnapshotReason]:
        """A reason when the payload is lossy and names no evidence of what that costs."""
        if self.lossless or self.evidence:
            return []
        recipe_id = self.identity.codec.recipe_id
        return [
            SnapshotReason(
                Code.UNPROVEN, f"the payload is lossy, coded by recipe {recipe_id}, and names no gate evidence"
            )
        ]

    def pack(self) -> bytes:
        """Canonical JSON; `UserError` when it could not be read back as what it is."""
        try:
            data = canonical(self).encode()
            if read_manifest(data) != self:
                raise UserError("it would be read back as another")
        except (ValueError, KvlabError) as error:
            raise UserError(f"this manifest cannot be written: {error}", code="user.manifest") from None
        return data


def build(**content) -> Manifest:
    """A manifest of these fields; `UserError` in one line when one is not what it should be."""
    try:
        return Manifest(**content)
    except ValidationError as error:
        raise UserError(f"this cannot be the manifest of a snapshot: {_first(error)}", code="user.manifest") from None


def read_manifest(data: bytes) -> Manifest:
    """The manifest of a snapshot whose checksum was right.

    Raises
    ------
    SnapshotRefused
        When it is too long, no manifest, or not in its canonical form.
    """
    if len(data) > MAX_MANIFEST:
        raise refusal(Code.MANIFEST_INVALID, f"the manifest has {len(data)} bytes; allowed: 1 to {MAX_MANIFEST}")
    try:
        manifest = Manifest.model_validate_json(data, strict=True)
        if canonical(json.loads(data)).encode() != data:
            raise ValueError("it is not in canonical form")
    except ValidationError as error:
        raise refusal(Code.MANIFEST_INVALID, f"the manifest is none: {_first(error)}") from None
    except (ValueError, RecursionError, UserError) as error:  # numbers without end, brackets without end, no geometry
        raise refusal(Code.MANIFEST_INVALID, f"the manifest is none: {error}") from None
    return manifest


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "the whole"
    return f"{where} is {problem['input']!r:.80}, but {problem['msg'][0].lower()}{problem['msg'][1:]}"

"""What a measuring stage writes about one variant's quality, and the id that belongs to it.

What the id is worth. `evidence_id` is a digest of all the rest. It finds every edit by whoever does not compute it
anew: a corrected number, a damaged file, the content of another file. It is no signature: nothing in it is secret,
so whoever forges the numbers can forge the id. Against that helps only to recompute the numbers from the tables that
they were made of, which the pipeline does whenever a stage is run again; the checks of consistency in
`kvlab.gate.evidence.faults` make a forgery laborious, not impossible.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import NonFinite, UserError, suggestion
from kvlab.core.recipe import digest
from kvlab.core.testimony import Pool, Served
from kvlab.gate.catalogue.strict import read_json
from kvlab.gate.evidence.measures import Count, Measure

UNOBSERVED = "unobserved"  # in evidence that was imported: nobody looked


class EvidenceError(UserError):
    """A file or an object that should be evidence is none."""

    code = "evidence"


class _Strict(Frozen):
    model_config = ConfigDict(strict=True)


class EvidenceIdentity(_Strict):
    """What was measured on what: everything that must be equal where two measurements are compared.

    `calibration` is a digest of what the codec was fitted with, None where nothing was.
    """

    model: str
    model_hash: str
    engine: str
    device: str
    dtype: str
    protocol: str
    context_tokens: Count
    corpus_hash: str
    recipe_id: str
    code: str
    calibration: str | None = None
    versions: dict[str, str]


class Observed(_Strict):
    """What really ran: the engine's cache, the codec, how often it fired, and what the cache then held.

    `kv_bytes` counts every stored byte, `kv_values` the K and V elements that they stand for. `codec` is None or
    empty where none ran. `canary_kl` is how far one bit at the same places, or the engine's own cache itself, moves
    the logits, in nats per token: proof that they hang on what is stored. `backend`, `pool` and `served` are what the
    running engine was found to be, and what it says of its own cache, where the variant is what that holds. `pattern`
    is what attention read by, or what was kept, with its settings; None where no one looked, or all was. `read_bytes`
    is what a step read of the contexts that `kv_values` counts. `bits` is what the codec was asked for, and `span`
    which tokens it stored: those of the context, or of the whole window. `spec_decoding` is by what the engine
    speculated; None where it did not.
    """

    kv_cache_dtype: str
    cache_class: str
    codec: str | None
    fires: Count
    expected_fires: Count
    kv_bytes: Count
    kv_values: Count
    canary_kl: float | None = None
    backend: str | None = None
    pool: Pool | None = None
    served: Served | None = None
    pattern: str | None = None
    read_bytes: Count | None = None
    bits: float | None = None
    span: Literal["context", "window"] | None = None
    spec_decoding: str | None = None

    @property
    def bits_per_value(self) -> float | None:
        """Stored bits for each value; None where none was stored."""
        return 8 * self.kv_bytes / self.kv_values if self.kv_values else None


class Family(_Strict):
    """The run that evidence is of: a digest of what was measured on what, and how many variants it tested."""

    run: str
    tested: Annotated[int, Field(ge=1, le=2**20)]


class Imported(_Strict):
    """Where evidence is from that was made of another harness's files: no engine of this project vouches for it.

    `plain` and `coded` are digests of the two results files, `differs` by what arguments the two runs differ, plain
    first, and `changed` how many answers do. `unobserved` names what nobody looked at: such a field holds
    `UNOBSERVED`, 0 or None, and says nothing; that the plain run was plain is the word of whoever named it so.
    """

    harness: str
    plain: str
    coded: str
    differs: dict[str, Annotated[tuple[str | None, str | None], Field(strict=False)]]
    changed: Count
    unobserved: Annotated[tuple[str, ...], Field(strict=False)]


class Evidence(_Strict):
    """One run of an eval on one variant; `paired` is variant minus baseline over the same items.

    `evals` names every eval that the run scored of this variant, so that one which is left out is missed; `family` says
    how many variants were tried beside it, whatever file the row comes in. `imported` is None of what this project
    measured.
    """

    schema_version: Annotated[int, Field(ge=3, le=3)] = 3  # a Literal would take 3.0 for 3
    quality_eval_id: str
    version: str
    metrics: dict[str, Measure]
    baseline: dict[str, Measure] = Field(default_factory=dict)
    paired: dict[str, Measure] = Field(default_factory=dict)
    identity: EvidenceIdentity
    observed: Observed
    baseline_recipe_id: str | None = None
    baseline_identity: EvidenceIdentity | None = None
    evals: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    family: Family
    imported: Imported | None = None
    evidence_id: str

    def content_id(self) -> str | None:
        """The id that this content has; None when it holds NaN or infinity, which have no canonical form."""
        try:
            return digest(self.model_dump(mode="json", exclude={"evidence_id"}))
        except ValueError:
            return None


def build(**content) -> Evidence:
    """Evidence with its id, from all other fields of `Evidence`.

    Raises
    ------
    EvidenceError
        When a field is missing, unknown or of a wrong type.
    NonFinite
        When a number is NaN or infinite.
    """
    unnamed = parse(content | {"evidence_id": ""})
    content_id = unnamed.content_id()
    if content_id is None:
        raise NonFinite(
            f"evidence of {unnamed.quality_eval_id} would hold NaN or infinity and was not made",
            code="non-finite.evidence",
        )
    return unnamed.model_copy(update={"evidence_id": content_id})


def parse(data: object) -> Evidence:
    """Evidence from a JSON object, or as it is; its id is checked by `kvlab.gate.evidence.faults.problems`.

    Raises
    ------
    EvidenceError
        In one line, when a field is missing, unknown or of a wrong type.
    """
    if isinstance(data, Evidence):
        return data
    try:
        return Evidence.model_validate(data)
    except ValidationError as error:
        raise EvidenceError(f"this is no evidence: {_complaints(error)}", code="evidence.fields") from None


def well_formed(pieces: Iterable[object]) -> tuple[Evidence, ...]:
    """Those pieces that are evidence, whatever else may be wrong with them."""
    found = []
    for piece in pieces:
        with suppress(EvidenceError):
            found.append(parse(piece))
    return tuple(found)


def read(path: Path | str) -> Evidence:
    """Evidence from a JSON file.

    Raises
    ------
    kvlab.core.errors.StorageError
        When the file cannot be read.
    kvlab.gate.catalogue.values.RowError
        When it is no JSON, gives a key twice, or holds NaN or infinity.
    EvidenceError
        When it holds something else.
    """
    try:
        return parse(read_json(path))
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}", code=error.code) from None


def _complaints(error: ValidationError) -> str:
    """What is wrong, unknown fields first: most missing ones are misspelt ones."""
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    found = [f"{'.'.join(map(str, e['loc'])) or 'the whole'} {_complaint(e)}" for e in errors]
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _complaint(error: dict) -> str:
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return f"is not known{suggestion(str(error['loc'][-1]), Evidence.model_fields)}"
    return f"is {error['input']!r:.80}, but {error['msg'][0].lower()}{error['msg'][1:]}"

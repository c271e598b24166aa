"""``metrics.json`` as a type: every part that a study declares, under one version.

The same models make the JSON schema in ``docs/metrics.schema.json``. A change that a reader of the file would notice
raises `VERSION`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Optional

from pydantic import JsonValue, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from kvlab.core.errors import MissingResult
from kvlab.core.recipe import Engine, Placement
from kvlab.core.records import Provenance, read_json
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.report.digest import refuse_broken
from kvlab_pipeline.studies.entries import Entry, Interval
from kvlab_pipeline.studies.register import chapters

VERSION = 4
# Studies of which nothing is there when params.yaml does not ask for them; `cells` tells of all cells, whosever.
OPTIONAL = frozenset(plan.STUDIES) - {plan.ALWAYS, "cells"}


class Identity(Provenance):
    """What every number was measured on, and the recipes by their ids."""

    calibration_corpus_hash: str | None
    calibration_origin: Engine
    machine: dict[str, str | int]
    recipes: dict[str, dict[str, JsonValue]]
    slug: str
    corpus: str
    disclosure: str | None
    """What has to be told of the model's weights wherever a number of it stands."""


class Sizes(Entry):
    """How much was measured, and how intervals are made."""

    context: int
    """Tokens of a window whose K and V are coded."""
    eval: int
    """Tokens after them, on which the model is judged."""
    windows: int
    confidence: float
    resamples: int
    seed: int


class CodebookEntry(Entry):
    """A fitted table of the scalar quantiser."""

    origin: Engine
    stream: Literal["k", "v"]
    placement: Placement
    stream_recipe_id: str
    name: str
    file: str
    bits: int
    variance_ratio: float
    layout: str
    centroids: tuple[float, ...]
    n_samples: int
    std: float
    mse_gaussian: float
    mse_fitted: float


class SigmaSummary(Entry):
    """Sigma_q of one engine's capture in a few numbers, over all layers and KV heads."""

    heads: int
    condition_median: float
    condition_max: float
    whitening_gain_db_median: float
    whitening_gain_db_max: float
    off_diagonal_ratio_median: float
    off_diagonal_ratio_max: float
    round_trip_error_median: float
    round_trip_error_max: float


class SigmaDrift(Entry):
    """How far the trace of Sigma_q on vLLM's capture lies from that on transformers'."""

    trace_ratio: dict[str, Interval]
    trace_difference_median: float
    trace_difference_max: float


class Sigma(Entry):
    """Sigma_q by engine, and the drift between the two."""

    hf: SigmaSummary | None = None
    vllm: SigmaSummary | None = None
    drift: SigmaDrift | None


class Shared(Entry):
    """What no study brings."""

    schema_version: Literal[4] = VERSION
    identity: Identity
    settings: dict[str, JsonValue]
    """All parameters that decide a number, and the number of layers of the model."""
    sizes: Sizes
    codebooks: tuple[CodebookEntry, ...]
    sigma: Sigma
    digest: str
    """Of everything else in the file, see `report.digest`."""


Metrics: type[Shared] = create_model(
    "Metrics",
    __base__=Shared,
    __doc__="All numbers of one model's report, each with its interval. KL and log loss are in nats per token.",
    **{
        name: (Optional[kind] if study in OPTIONAL else kind, ...)  # noqa: UP045, for kinds that are no types
        for study, chapter in chapters().items()
        for name, kind in chapter.parts.items()
    },
)


def read(path: Path) -> Metrics:
    """The metrics in a file.

    Raises
    ------
    StorageError
        The file cannot be read, or is no JSON.
    MissingResult
        It is of another version of the schema, or no metrics; one line says where it differs.
    StaleResult
        It was changed after it was written.
    """
    data = read_json(path)
    found = checked(data, str(path))
    refuse_broken(data, str(path), "kvlab step metrics")
    return found


def refuse_other_version(data: object, origin: str) -> None:
    """`MissingResult`, which names `origin`, unless JSON data says that it is of this version of the schema."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != VERSION:
        found = "has no schema_version" if version is None else f"is of schema_version {version!r}"
        raise MissingResult(
            f"{origin} {found}, this kvlab reads metrics of version {VERSION}; run `kvlab step metrics` again",
            code="missing-result.other-version",
        )


def checked(data: object, origin: str) -> Metrics:
    """JSON data as metrics; `MissingResult`, which names `origin`, where they are none."""
    refuse_other_version(data, origin)
    try:
        return Metrics.model_validate(data)
    except ValidationError as error:
        first, count = error.errors()[0], error.error_count()
        place = ".".join(map(str, first["loc"]))
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise MissingResult(
            f"{origin} is no metrics of version {VERSION}: {place}: {first['msg']}{more};"
            " run `kvlab step metrics` again",
            code="missing-result.no-metrics",
        ) from None


def load(path: Path) -> dict:
    """The metrics in a file as pages and programs read them; as `read`."""
    return plain_json(read(path))


def plain_json(metrics: Metrics) -> dict:
    """Metrics as the JSON that pages and programs read; a part that does not apply to one engine is left out."""
    data = metrics.model_dump(mode="json")
    data["sigma"] = {name: part for name, part in data["sigma"].items() if part is not None or name == "drift"}
    return data


class _Plain(GenerateJsonSchema):
    """Without the titles that pydantic makes of field names."""

    def field_title_should_be_set(self, schema) -> bool:
        return False


def json_schema() -> dict:
    """The published schema."""
    made = Metrics.model_json_schema(mode="serialization", schema_generator=_Plain)
    return made | {"$schema": GenerateJsonSchema.schema_dialect}

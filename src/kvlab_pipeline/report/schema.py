"""``metrics.json``: the table of a model's numbers and what they were measured on; read and written here alone.

What a part holds its study declares (see `studies.tidy`); the declarations make the JSON schema in
``docs/metrics.schema.json`` too. A change that a reader of the file would notice raises `VERSION`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from kvlab.core.errors import MissingResult, StaleResult
from kvlab.core.recipe import Engine, Placement
from kvlab.core.records import Provenance, read_json
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.report.calibration import DRIFT, SIGMA
from kvlab_pipeline.report.digest import DIGEST, refuse_broken, with_digest
from kvlab_pipeline.studies import tidy
from kvlab_pipeline.studies.register import chapters
from kvlab_pipeline.studies.tidy import Entry, EstimateRow, Field, Reference, Sentences

VERSION = 5
# Studies of which nothing is there when params.yaml does not ask for them; `cells` tells of all cells, whosever.
OPTIONAL = frozenset(plan.STUDIES) - {plan.ALWAYS, "cells"}
CALIBRATION = "calibration"
# By part, the study that brings it and what it holds.
PARTS: dict[str, tuple[str, Field]] = {
    "sigma": (CALIBRATION, SIGMA),
    "sigma_drift": (CALIBRATION, DRIFT),
    **{name: (study, held) for study, chapter in chapters().items() for name, held in chapter.parts.items()},
}
TABLES = {name: part for name, part in PARTS.items() if not isinstance(part[1], Sentences)}


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


class Metrics(Entry):
    """All numbers of one model's report, a row each."""

    schema_version: Literal[5] = VERSION
    identity: Identity
    settings: dict[str, JsonValue]
    """All parameters that decide a number, and the number of layers of the model."""
    sizes: Sizes
    codebooks: tuple[CodebookEntry, ...]
    notes: dict[str, tuple[str, ...]]
    """What is said beside the numbers, by part."""
    compared: dict[str, Reference]
    """The cells that rows set against each other, by the names that rows have for them."""
    estimates: tuple[EstimateRow, ...]
    digest: str
    """Of everything else in the file, see `report.digest`."""


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
        raise no_metrics(error, origin) from None


def no_metrics(error: ValidationError, origin: str) -> MissingResult:
    """The refusal of what is no metrics, in a line."""
    first, count = error.errors()[0], error.error_count()
    place = ".".join(map(str, first["loc"]))
    more = f" (and {count - 1} more)" if count > 1 else ""
    return MissingResult(
        f"{origin} is no metrics of version {VERSION}: {place}: {first['msg']}{more}; run `kvlab step metrics` again",
        code="missing-result.no-metrics",
    )


def load(path: Path) -> dict:
    """The metrics in a file as pages and programs read them, part by part (`by_part`); raises as `read`."""
    return by_part(read(path))


def filed(found: dict) -> dict:
    """Metrics part by part as what is written: the table, and the digest of the file.

    Raises
    ------
    Fault
        A part has other fields than its study declares.
    MissingResult
        A number is outside its own interval, or no number.
    """
    try:
        made = [pair for name, (study, held) in TABLES.items() for pair in tidy.melt(study, name, held, found[name])]
        cells = tidy.named_cells(cell for _, cells in made for cell in cells)
        shared = {name: found[name] for name in ("identity", "settings", "sizes", "codebooks")}
        notes = {name: found[name] for name in PARTS if name not in TABLES}
        rows = [row for row, _ in made]
        metrics = Metrics(**shared, notes=notes, compared=cells, estimates=rows, digest="")
    except ValidationError as error:
        raise no_metrics(error, "what was measured") from None
    # What a row has not is not written, but for its value: that there is no number is said.
    data = metrics.model_dump(mode="json", exclude={"estimates", DIGEST})
    return with_digest(data | {"estimates": [filed_row(row) for row in metrics.estimates]})


def filed_row(row: EstimateRow) -> dict:
    """A row without the columns that it does not fill."""
    return (
        {"value": row.value}
        | row.model_dump(mode="json", exclude_none=True, exclude={"levels"})
        | {"levels": row.levels}
    )


def by_part(metrics: Metrics) -> dict:
    """Identity, settings, sizes and codebooks, and each part as its study declares it.

    A part that was not measured is empty, or None: of a study that is run on demand, where none of its parts has a row.
    """
    rows: dict[str, list[EstimateRow]] = {}
    for row in metrics.estimates:
        rows.setdefault(row.part.partition(".")[0], []).append(row)
    if unknown := rows.keys() - TABLES.keys():
        raise StaleResult(
            f"no study has the parts {sorted(unknown)}; run `kvlab step metrics` again", code="stale.parts"
        )
    ran = {TABLES[name][0] for name in rows}
    data: dict[str, Any] = {
        name: tidy.gather(name, held, rows.get(name, []), metrics.compared)
        if study in ran or study not in OPTIONAL
        else None
        for name, (study, held) in TABLES.items()
    }
    shared = metrics.model_dump(mode="json", include={"schema_version", "identity", "settings", "sizes", "codebooks"})
    return shared | data | {name: list(said) for name, said in metrics.notes.items()}


class _Plain(GenerateJsonSchema):
    """Without the titles that pydantic makes of field names."""

    def field_title_should_be_set(self, schema) -> bool:
        return False


def json_schema() -> dict:
    """The published schema; its ``$defs`` say of the rows of each part their levels, their estimands and the units."""
    made = Metrics.model_json_schema(mode="serialization", schema_generator=_Plain)
    parts = {name: told for part, (_, held) in TABLES.items() for name, told in tidy.described(part, held).items()}
    return made | {"$schema": GenerateJsonSchema.schema_dialect, "$defs": made["$defs"] | parts}

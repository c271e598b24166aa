"""The files that measuring the gate's rows leaves: a table of scores, and a record beside it. Torch-free.

A job leaves ``<engine>.parquet``, one row per (variant, eval, metric, item), and ``<engine>.json``, a
`MechanismsRecord`. Evidence is made of both by `kvlab step rows`, so its numbers can be made again from the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import polars as pl
from pydantic import Field

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import Fault, StaleResult, StorageError, WitnessDisagrees
from kvlab.core.records import Provenance, file_hash, finite, forget, write_json, write_table
from kvlab.core.testimony import LEAST, Pool, Served, Testimony
from kvlab_pipeline.studies.mechanisms.plan import SERVED
from kvlab_pipeline.studies.record import read_record

# One row per scored item of a variant: a window of text, of which `variant` and `baseline` are means over its scored
# tokens, or a needle, 1 where it was found and 0 where not, or a text after which something is written: the share of
# its answers that are found, or of its tokens that are the same. Nats per token.
SCORES = pl.Schema(
    {
        "label": pl.String,
        "quality_eval_id": pl.String,
        "metric": pl.String,
        "item": pl.Int32,
        "variant": pl.Float64,
        "baseline": pl.Float64,
    }
)


ROUNDED = 1e-9  # relative, of what is computed twice from the same numbers
Some = Annotated[int, Field(ge=1)]
COUNTED = ("fires", "expected_fires", "kv_bytes", "kv_values", "read_bytes")


class Counts(Frozen):
    """What was observed of some items: how often the codec fired, and what the cache then held.

    `kv_bytes` counts every stored byte, `kv_values` the K and V elements that they stand for. Where no codec ran both
    numbers of fires are 0. `read_bytes` is what a step read of all contexts, where attention read by a pattern.
    """

    items: Some
    fires: int
    expected_fires: int
    kv_bytes: int
    kv_values: Some
    read_bytes: int | None = None


class Length(NamedTuple):
    """Tokens of an item that are stored, and in how many calls of the model."""

    tokens: int
    calls: int


class LengthCounts(Counts):
    """The same of those items of which so many `tokens` were stored, in so many `calls` of the model."""

    tokens: Some
    calls: int = 1

    @property
    def length(self) -> Length:
        """What its items are alike in."""
        return Length(self.tokens, self.calls)


class EvalRun(Counts):
    """What was observed while one version of an eval ran, and of that the part of the items of each length.

    `context` is the length that an eval with texts of its own speaks for, None of one whose contexts are the windows'.
    """

    quality_eval_id: str
    version: str
    context: int | None = None
    lengths: Annotated[tuple[LengthCounts, ...], Field(min_length=1)]

    @classmethod
    def of(cls, lengths: Sequence[LengthCounts], **named) -> EvalRun:
        """What the parts amount to."""
        told = {name: [getattr(one, name) for one in lengths] for name in ("items", *COUNTED)}
        counted = {name: None if None in some else sum(some) for name, some in told.items()}
        return cls(**named, **counted, lengths=lengths)


class MechanismRow(Frozen):
    """One variant, measured.

    `span` says which tokens are stored otherwise: the context's alone, or those of the whole window, as in an engine's
    own cache. `throughput_tok_s` is tokens of a scored window over the median of `seconds`: the engine's own pass over
    each window, and for a codec encoding and decoding the context's K and V beside it; both are of no row of the Cache,
    whose calls are timed by nobody here. The overheads are median milliseconds per window, of all layers. `canary_kl`
    is what a one-bit codec does at the same places, or, of an engine's own cache, what it does itself: proof that the
    logits hang on it. Where a row is what the engine's own cache holds, `backend` is the class that computed attention
    over it, `pool` that cache by the engine's own count, and `served` what the engine says that its pages are coded by;
    their `canary_kl` is what zeroed pages do. Where attention read by a `pattern`, that is its name with all settings,
    as the running model had it, and `canary_kl` what reading next to nothing does. The same of what keeps less of a
    finished context, measured as codecs are; then `witnessed_kl` is how far a second computation of one window ended,
    nats per token.
    """

    label: str
    mechanism: str
    mechanism_variant: str
    method: str | None
    scope: str | None
    bits: int | None
    protocol: str
    span: str
    recipe_id: str
    kv_cache_dtype: str
    cache_class: str
    codec: str | None
    throughput_tok_s: float | None
    seconds: tuple[float, ...]
    compression_overhead_ms: float | None
    decompression_overhead_ms: float | None
    canary_kl: float | None
    fires: int
    expected_fires: int
    kv_bytes: int
    kv_values: int
    backend: str | None = None
    pool: Pool | None = None
    served: Served | None = None
    pattern: str | None = None
    read_bytes: int | None = None
    witnessed_kl: float | None = None
    evals: tuple[EvalRun, ...]


class Missing(Frozen):
    """A variant that could not be measured here, and why."""

    label: str
    mechanism: str
    mechanism_variant: str
    reason: str


class MechanismsRecord(Frozen):
    """The JSON of one engine's job.

    `provenance` names the windows' corpus, `needles_hash` and `ruler_hash` the retrieval items,
    `code` the digest of what measured, `documents` that of each scored window, by number; `witnessed` is what a second
    computation found of one variant of each codec, `table` the hash of the parquet.
    """

    provenance: Provenance
    needles_hash: str
    ruler_hash: str | None = None
    code: str
    engine: str
    dtype: str
    context: int
    eval: int
    documents: tuple[int, ...] | None = None
    rows: tuple[MechanismRow, ...]
    missing: tuple[Missing, ...]
    witnessed: tuple[Testimony, ...] = ()
    table: str = ""


def write_mechanisms(path: Path | str, record: MechanismsRecord, scores: pl.DataFrame) -> None:
    """Write the parquet, then the JSON beside it, whose presence marks the result as whole."""
    path = Path(path)
    forget(path)
    write_table(path.with_suffix(".parquet"), finite(scores, path).match_to_schema(SCORES))
    whole = record.model_copy(update={"table": file_hash(path.with_suffix(".parquet"))})
    write_json(path.with_suffix(".json"), whole.model_dump(mode="json"))


def read_mechanisms(path: Path | str) -> tuple[MechanismsRecord, pl.DataFrame]:
    """Read a record and the table beside it.

    Raises
    ------
    StorageError
        A file is missing or not of this kind, or the table lacks a metric of a measured variant.
    StaleResult
        The table is not the one that the record was written with.
    Fault, WitnessDisagrees
        See `refuse_impossible`.
    NonFinite
        A score is NaN or infinite.
    """
    path = Path(path)
    record = read_record(path.with_suffix(".json"), MechanismsRecord, "mechanisms")
    try:
        table = pl.read_parquet(path.with_suffix(".parquet"))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StorageError(f"cannot read {path.with_suffix('.parquet')}: {error}") from None
    if table.schema != SCORES:
        raise StorageError(
            f"{path.with_suffix('.parquet')} has columns {dict(table.schema)}, expected {dict(SCORES)}",
            code="storage.columns",
        )
    table = finite(table, path)
    if record.table != file_hash(path.with_suffix(".parquet")):
        raise StaleResult(
            f"{path} does not name the table beside it, which is another; measure again", code="stale.other-table"
        )
    refuse_impossible(record, path)
    return record, table


def refuse_impossible(record: MechanismsRecord, path: Path) -> None:
    """What a row says twice must be said alike, and no cache can be smaller than its codes.

    Raises
    ------
    Fault
        A throughput is not that of the row's seconds, counts are not those of its first eval, rows count other values
        of a token, or see `refuse_miscounted`.
    WitnessDisagrees
        Codecs ran and no witness computed any of them again, or it saw another number of tensors reach attention.
    """
    due = None  # K and V elements of a token
    for row in record.rows:
        for one in (one for run in row.evals for one in run.lengths):
            due = due or one.kv_values / (one.items * one.tokens)
            if one.kv_values != due * one.items * one.tokens:
                raise Fault(
                    f"{path}: {row.label} counts {one.kv_values / one.items:g} values of {one.tokens} tokens, of which"
                    f" the first row has {due:g} each",
                    code="fault.values",
                )
        throughput = (record.context + record.eval) / median(row.seconds) if row.seconds else None
        if throughput and abs((row.throughput_tok_s or 0) - throughput) > ROUNDED * throughput:
            raise Fault(
                f"{path}: {row.label} runs {row.throughput_tok_s:g} tok/s, and its seconds make {throughput:g}",
                code="fault.throughput",
            )
        if any(getattr(row, name) != getattr(row.evals[0], name) for name in COUNTED):
            raise Fault(
                f"{path}: {row.label} counts other fires or bytes than its eval {row.evals[0].quality_eval_id}",
                code="fault.counts",
            )
        if bool(row.pattern) != (row.read_bytes is not None) or (row.pattern and row.canary_kl is None):
            raise Fault(
                f"{path}: {row.label} says what was read, or by which pattern, and not both and its canary",
                code="fault.pattern",
            )
        if (row.pattern or row.protocol == SERVED) and row.fires and row.witnessed_kl is None:
            raise WitnessDisagrees(f"{path}: no witness computed {row.label} again; measure again", code="witness.none")
        for run in row.evals:
            refuse_miscounted(record, row, run, path)
    beside = [row for row in record.rows if row.codec and not row.served and row.protocol != SERVED]
    if beside and not record.witnessed:
        raise WitnessDisagrees(
            f"{path}: no witness computed any of its codecs again; measure again", code="witness.none"
        )
    if any(one.effects != one.expected_effects for one in record.witnessed):
        raise WitnessDisagrees(
            f"{path}: not all that its codecs answered reached attention; measure again", code="witness.other-numbers"
        )


def refuse_miscounted(record: MechanismsRecord, row: MechanismRow, run: EvalRun, path: Path) -> None:
    """What an eval counts, length by length of its items.

    Raises
    ------
    Fault
        All is not the sum of its lengths, whose tokens are not those of the row's span; a codec was idle, or fewer bits
        are stored than its own; or other bytes than those of the engine's pages and of each request's exact tokens.
    """
    where, named = f"{path}: {row.label} in {run.quality_eval_id}", ("quality_eval_id", "version", "context")
    if run != EvalRun.of(run.lengths, **{name: getattr(run, name) for name in named}):
        raise Fault(f"{where} counts other items, fires or bytes than its lengths together", code="fault.counts")
    own = run.context is not None  # texts of their own length
    if not own and any((one.tokens > record.context) != (row.span == "window") for one in run.lengths):
        found = ", ".join(str(one.tokens) for one in run.lengths)
        raise Fault(
            f"{where} counts items of {found} tokens, and stores the {row.span} after contexts of {record.context}",
            code="fault.span",
        )
    for one in run.lengths:
        stored = 8 * one.kv_bytes / one.kv_values
        paged = one.kv_bytes - one.items * row.pool.exact_bytes if row.pool else 0
        if row.pool and paged * row.pool.block_values != one.kv_values * row.pool.block_bytes:
            raise Fault(
                f"{where} stores {stored:.4g} bits a value of {one.tokens} tokens; the engine's pages take"
                f" {8 * row.pool.block_bytes / row.pool.block_values:.4g}, and {row.pool.exact_bytes} bytes a request",
                code="fault.page-bytes",
            )
    stored = 8 * run.kv_bytes / run.kv_values  # of all items: one that says little may take less
    if any(one.fires != one.expected_fires for one in run.lengths) or (row.bits and stored < LEAST * row.bits):
        raise Fault(
            f"{where} stores {stored:.3g} bits a value, after {run.fires} of {run.expected_fires} fires; its codes"
            f" alone take {row.bits}",
            code="fault.too-few-bits",
        )

"""Rows and evidence out of what `kvlab step mechanisms` measured, and what is current now.

A row rests on every eval that was run on it: all evidence is attached and judged. The scores are read from the tables,
so the evidence can be made again, and not from anything that the measuring stage summed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from kvlab.core.errors import MixedIdentity, StorageError, UnknownName
from kvlab.core.recipe import digest
from kvlab.core.records import read_json, write_json
from kvlab.gate import registry
from kvlab.gate.cases import DTYPE_BITS
from kvlab.gate.catalogue import EVIDENCE, checked_row
from kvlab.gate.catalogue.kinds import MOST_CHARACTERS
from kvlab.gate.evidence import BASELINE_RECIPE, Evidence, build, measured, paired
from kvlab.output.terminal import printable
from kvlab_pipeline.studies.mechanisms.plan import BASELINE, FIDELITY, GREEDY, METRICS, NEEDLE, TASKS, scored_items
from kvlab_pipeline.studies.mechanisms.records import EvalRun, MechanismRow, MechanismsRecord, Missing, read_mechanisms

UNMEASURED = "unsupported"
"""What is claimed of a mechanism that could not be run; why stands in its notes."""

TOKENS_OF_A_K = 1024


RATES = {FIDELITY: False, NEEDLE: True, GREEDY: False} | dict.fromkeys(TASKS, True)
"""Whether the items of an eval are answered or not, 1 or 0, or in part."""
RULER = "ruler.json"
"""The record of RULER's items, beside that of the needles."""


def write(
    records: Sequence[Path], windows: Path, needles: Path, code: str, claim: str, out: Path, current: Path
) -> list[dict[str, Any]]:
    """Write the rows of one model and, to `current`, what its evidence must have been measured on.

    Parameters
    ----------
    records : sequence of Path
        What `kvlab step mechanisms` wrote, a file for each engine.
    windows, needles : Path
        What `kvlab step corpus` and `kvlab step needles` wrote for the model; their records are read, and that of
        RULER's items beside the needles'.
    code : str
        Digest of the code that measures now.
    claim : str
        Tier that every row claims which was measured.
    out, current : Path

    Raises
    ------
    MixedIdentity
        The records are not of one model, or the needles and windows are of another.
    StorageError
        A file cannot be read, or a table does not hold exactly the scores that its record and the items tell of.
    NonFinite
        A score is NaN or infinite.
    RowError
        A record holds what no row may.
    """
    found = [read_mechanisms(path) for path in records]
    models = {record.provenance.model for record, _ in found}
    if len(models) != 1:
        raise MixedIdentity({"model": models})
    of_windows, of_needles = read_json(windows.with_suffix(".json")), read_json(needles.with_suffix(".json"))
    of_ruler = read_json(needles.with_name(RULER))
    now, there = current_of(of_windows, of_needles, of_ruler, code), items_of(of_windows, of_needles, of_ruler)
    for path, (record, _) in zip(records, found, strict=True):
        refuse_other_items(path, record, there)
    tested = sum(variants_of(record) for record, _ in found)
    rows = [row for record, scores in found for row in rows_of(record, scores, claim, tested)]
    write_json(current, {models.pop(): now})
    write_json(out, rows)
    return rows


def current_of(windows: dict, needles: dict, ruler: dict, code: str) -> dict[str, str]:
    """What a model's evidence must have been measured on, from the records of its windows and of its items."""
    try:
        hashes = {windows["model_hash"], needles["model_hash"], ruler["model_hash"]}
        corpus_hash = texts_hash(windows["corpus_hash"], needles["needles_hash"], ruler["items_hash"])
    except (KeyError, TypeError) as error:
        raise StorageError(
            f"the records of windows and needles do not say {error}; run both stages again",
            code="storage.missing-field",
        ) from None
    if len(hashes) != 1:
        raise MixedIdentity({"model_hash": hashes})
    return {"model_hash": hashes.pop(), "corpus_hash": corpus_hash, "code": code}


def items_of(windows: dict, needles: dict, ruler: dict) -> dict[str, int]:
    """How many items each eval has, from the records of windows, needles and RULER's texts."""
    try:
        test, tasks = windows["windows"]["test"], ruler["tasks"]
        passed = {FIDELITY: test, NEEDLE: needles["n"], GREEDY: min(test, ruler["greedy"])}
        return passed | {name: tasks.get(task, 0) for name, task in TASKS.items()}
    except (KeyError, TypeError) as error:
        raise StorageError(
            f"the records of windows and needles do not say {error}; run both stages again",
            code="storage.missing-field",
        ) from None


def refuse_other_items(path: Path, record: MechanismsRecord, there: dict[str, int]) -> None:
    """`StorageError` where a variant was not asked all items: what was left out may be what it lost."""
    for row in record.rows:
        scored = {run.quality_eval_id: run.items for run in row.evals}
        due = scored_items(there, record.engine, row.protocol)
        if scored != due or len(scored) != len(row.evals):
            raise StorageError(
                f"{path}: {row.label!r} has items {scored}, those that there are: {due};"
                " run `kvlab step mechanisms` again",
                code="storage.other-items",
            )


def texts_hash(windows: str, needles: str, ruler: str | None) -> str:
    """One hash of all that is scored: a row rests on everything."""
    return digest({"windows": windows, "needles": needles, "ruler": ruler})


def rows_of(
    record: MechanismsRecord, scores: pl.DataFrame, claim: str, tested: int | None = None
) -> list[dict[str, Any]]:
    """The rows of one engine as JSON objects: those measured with their evidence, then those that could not be.

    `tested` is how many variants the whole run tried; those of this record, where it is all of the run.
    """
    refuse_other_labels(record, scores)
    tested = variants_of(record) if tested is None else tested
    rows = [measured_row(record, row, scores, claim, tested) for row in record.rows]
    return rows + [missing_row(record, missing) for missing in record.missing]


def variants_of(record: MechanismsRecord) -> int:
    """How many variants were tested beside the engine as it is."""
    return sum(row.mechanism != BASELINE for row in record.rows)


def measured_row(
    record: MechanismsRecord, row: MechanismRow, scores: pl.DataFrame, claim: str, tested: int
) -> dict[str, Any]:
    """One row with a piece of evidence for each eval.

    The baseline shows what a second pass of itself costs on text. Of the other evals it is the one that is compared
    with: what its second run answers otherwise is rounding, and no loss of its own.
    """
    runs = [run for run in row.evals if row.mechanism != BASELINE or run.quality_eval_id == FIDELITY]
    family = {"run": row_identity(record, row.label)["run"], "tested": max(1, tested)}
    told = {"evals": tuple(run.quality_eval_id for run in runs), "family": family}
    pieces, cited = [evidence_of(record, row, run, scores, told) for run in runs], cited_of(row)
    fidelity = next((piece for piece in pieces if piece.quality_eval_id == FIDELITY), None)
    counted = row if cited is row.evals[0] else cited  # a row's own counts are those of its first eval
    bits = 8 * counted.kv_bytes / counted.kv_values if counted.kv_values else None
    stated = row.model_dump(include=set(COPIED)) | counted.model_dump(include=set(RAN))
    stated |= {
        "support_status": claim,
        "mechanism_variant": None if row.mechanism == BASELINE else row.mechanism_variant,
        "compression_method": row.method,
        "compression_scope": row.scope,
        "stored_span": row.span,
        "bits_per_value": bits,
        "spec_decoding": "none",
    }
    if row.pool is not None:
        stated |= row.pool.model_dump() | {"capacity_tokens": row.pool.capacity_tokens}
    stated |= {name: fidelity.metrics[name].value for name in METRICS[FIDELITY]} if fidelity else {}
    if row.mechanism != BASELINE:
        stated |= {
            "compression_ratio": bits / native_bits(record.dtype) if bits else None,
            "quality_eval_id": cited.quality_eval_id,
        }
    attached = {EVIDENCE: [piece.model_dump(mode="json") for piece in pieces]}
    return _checked(row_identity(record, row.label) | stated) | attached


def cited_of(row: MechanismRow) -> EvalRun:
    """The eval that a row names: its first that may carry a claim of the mechanism, by the gate's registry.

    What keeps or reads less has to show retrieval, and is held to what it stored and read of those contexts.
    """
    known = _registry()
    entry = known.mechanism(row.mechanism, row.mechanism_variant)
    return next((run for run in row.evals if entry and known.carries(run.quality_eval_id, entry)), row.evals[0])


@cache
def _registry() -> registry.Registry:
    return registry.load()


COPIED = (
    *("mechanism", "recipe_id", "protocol", "bits", "throughput_tok_s"),
    *("compression_overhead_ms", "decompression_overhead_ms"),
    *("kv_cache_dtype", "cache_class", "codec", "backend", "pattern"),
)
"""Fields that a row has from the record, by the same names."""


def missing_row(record: MechanismsRecord, missing: Missing) -> dict[str, Any]:
    """A row that was not measured, and says why."""
    why = printable(" ".join(missing.reason.split()))[:MOST_CHARACTERS].strip()
    stated = {"mechanism": missing.mechanism, "mechanism_variant": missing.mechanism_variant}
    stated |= {"support_status": UNMEASURED, "mechanism_notes": why}
    return _checked(row_identity(record, missing.label) | stated)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what it does not say; `RowError` for what no row may."""
    return {name: value for name, value in checked_row(row).items() if value is not None}


def row_identity(record: MechanismsRecord, label: str) -> dict[str, Any]:
    """Which row it is, and what it was measured on; the run is named by the latter."""
    found = record.provenance
    ageing = {
        "model_hash": found.model_hash,
        "corpus_hash": texts_hash(found.corpus_hash, record.needles_hash, record.ruler_hash),
        "code": record.code,
    }
    return ageing | {
        "row_id": "/".join((found.model, record.engine, label.replace(" ", "-"))),
        "run": digest(ageing),
        "model": found.model,
        "engine": record.engine,
        "device": found.device,
        "dtype": record.dtype,
        "calibration": digest(found.calibration) if found.calibration else None,
        "context_tokens": record.context,
        "context_band": band(record.context),
    }


def native_bits(dtype: str) -> int:
    """Bits of an element of the uncompressed cache."""
    if dtype not in DTYPE_BITS:
        raise UnknownName("dtype", dtype, DTYPE_BITS)
    return DTYPE_BITS[dtype]


def band(tokens: int) -> str:
    """The band of contexts that a row of one length speaks for: as the length itself, which is its upper end."""
    return f"{tokens // TOKENS_OF_A_K}k" if tokens % TOKENS_OF_A_K == 0 else str(tokens)


def evidence_of(
    record: MechanismsRecord, row: MechanismRow, run: EvalRun, scores: pl.DataFrame, told: dict[str, Any]
) -> Evidence:
    """What one eval found of one row, held against the engine as it is, item by item; `told` is of the row's run."""
    by_metric = scores_of(record, row, run, scores)
    rate = RATES[run.quality_eval_id]
    # A needle, a question has a text of its own; the scored windows may share documents.
    apart = record.documents if run.quality_eval_id in (FIDELITY, GREEDY) else None
    identity = _evidence_identity(record, row)
    identity |= {"context_tokens": run.context} if run.context else {}
    return build(
        quality_eval_id=run.quality_eval_id,
        version=run.version,
        metrics={metric: measured(variant, rate, documents=apart) for metric, (variant, _) in by_metric.items()},
        baseline={metric: measured(baseline, rate, documents=apart) for metric, (_, baseline) in by_metric.items()},
        paired={metric: paired(*found, rate, documents=apart) for metric, found in by_metric.items()},
        identity=identity | {"recipe_id": row.recipe_id},
        observed=row.model_dump(include=set(SEEN)) | run.model_dump(include=set(RAN)),
        **told,
        baseline_recipe_id=BASELINE_RECIPE,
        baseline_identity=identity | {"recipe_id": BASELINE_RECIPE},
    )


def _evidence_identity(record: MechanismsRecord, row: MechanismRow) -> dict[str, Any]:
    """Of variant and baseline alike; where nothing is coded every protocol is the same, so that it is the variant's."""
    shared = (
        "model",
        "model_hash",
        "engine",
        "device",
        "dtype",
        "context_tokens",
        "corpus_hash",
        "code",
        "calibration",
    )
    known = row_identity(record, row.label)
    return {name: known[name] for name in shared} | {
        "protocol": row.protocol,
        "versions": dict(record.provenance.versions),
    }


SEEN = (
    *("kv_cache_dtype", "cache_class", "codec", "canary_kl", "backend", "pool", "served", "pattern"),
    *("bits", "span"),
)
"""What was observed of the row's engine, whatever it was asked."""
RAN = ("fires", "expected_fires", "kv_bytes", "kv_values", "read_bytes")
"""What was observed of one eval's own run."""


# ------------------------------------------------------------------------------------ the scores


class Scores(NamedTuple):
    """One metric of one row by item, float64 [items]."""

    variant: np.ndarray
    baseline: np.ndarray


def scores_of(record: MechanismsRecord, row: MechanismRow, run: EvalRun, scores: pl.DataFrame) -> dict[str, Scores]:
    """What one eval found of one row, by metric and in the order of the items.

    All rows of a protocol are held against one baseline: a snapshot is scored in another pass than what is coded
    inside the forward, and in bfloat16 two passes may answer an item differently.

    Raises
    ------
    StorageError
        The eval is not known, an item is missing or there twice, or the baseline is not the one that all other rows
        of the protocol are held against.
    """
    label, alike = row.label, [other.label for other in record.rows if other.protocol == row.protocol]
    asked = run.quality_eval_id
    if asked not in METRICS:
        raise StorageError(
            f"no eval {asked!r} is known here; allowed: {', '.join(METRICS)}", code="storage.unknown-eval"
        )
    of_eval = scores.filter(pl.col("label").is_in(alike), quality_eval_id=asked)
    return {
        metric: _scores(f"{metric} of {label!r}", label, run, of_eval.filter(metric=metric))
        for metric in METRICS[asked]
    }


def _scores(place: str, label: str, run: EvalRun, scores: pl.DataFrame) -> Scores:
    """`scores` are those of one metric, of all rows of a protocol."""
    mine = scores.filter(label=label).sort("item")
    if mine["item"].to_list() != list(range(run.items)):
        raise StorageError(
            f"{place} has {len(mine)} scores of {mine['item'].n_unique()} items; asked were {run.items}, counted from"
            " zero, each once; run `kvlab step mechanisms` again",
            code="storage.scores-missing",
        )
    held = scores.group_by("item").agg(pl.col("baseline").n_unique())
    if held["baseline"].max() > 1:
        raise StorageError(
            f"{place} is held against another baseline than other rows; run `kvlab step mechanisms` again",
            code="storage.other-baseline",
        )
    return Scores(mine["variant"].to_numpy(), mine["baseline"].to_numpy())


def refuse_other_labels(record: MechanismsRecord, scores: pl.DataFrame) -> None:
    """`StorageError` unless the table has scores of the record's rows and of no others."""
    told, there = {row.label for row in record.rows}, set(scores["label"])
    if told != there or len(told) != len(record.rows):
        other = ", ".join(map(repr, sorted(told ^ there))) or "one of them twice"
        raise StorageError(f"record and table of {record.engine} differ in {other}; run `kvlab step mechanisms` again")

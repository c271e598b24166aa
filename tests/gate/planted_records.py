"""Records of made-up measurements, as `kvlab step mechanisms` writes them, in which every loss is known."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

from kvlab.core.recipe import IDENTITY, digest
from kvlab.core.records import Provenance, write_json
from kvlab.core.testimony import Pool, Proof, Served, Testimony
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.rows import Row, read_rows
from kvlab.gate.check import check
from kvlab_pipeline.gate_page.measured_rows import RAN
from kvlab_pipeline.studies.mechanisms.plan import BASELINE, FIDELITY, NEEDLE
from kvlab_pipeline.studies.mechanisms.records import (
    SCORES,
    EvalRun,
    LengthCounts,
    MechanismRow,
    MechanismsRecord,
    Missing,
    write_mechanisms,
)

WINDOWS, NEEDLES, CONTEXT = 128, 400, 512
WINDOW = CONTEXT + 128  # tokens
VALUES = 2 * 6 * 64 * CONTEXT  # of one context
PLAIN = {"kv_cache_dtype": "bfloat16", "cache_class": "DynamicCache"}
SCORED = {FIDELITY: WINDOWS, NEEDLE: NEEDLES}


def seconds(each: float) -> tuple[float, ...]:
    """What the passes of all windows took, within a tenth of `each`."""
    return tuple(each * (1 + 0.1 * np.sin(np.arange(WINDOWS) + each)))


def record(engine="hf", rows=(), missing=(), **changed) -> MechanismsRecord:
    """What a job says of itself."""
    provenance = {"model": "reference", "model_hash": "5eed", "corpus_hash": "7e47", "calibration": {"hf": "ca11"}}
    provenance |= {"versions": {"kvlab": "0"}, "device": "cpu"}
    changed_there = {key: changed.pop(key) for key in list(changed) if key in provenance}
    fixed = {
        "needles_hash": "2eed1e",
        "ruler_hash": "7ex7",
        "code": "c0de",
        "dtype": "bfloat16",
        "context": CONTEXT,
        "eval": 128,
    }
    return MechanismsRecord(
        provenance=Provenance(**provenance | changed_there),
        engine=engine,
        rows=tuple(rows),
        missing=tuple(missing),
        **fixed | {"witnessed": (SEEN,)} | changed,
    )


SEEN = Testimony(
    cell_id="c" * 12,
    window=0,
    reference_kl=1e-9,
    alternative_kl=1e-9,
    tensor_error=1e-7,
    read_error=1e-7,
    effects=12,
    expected_effects=12,
    nbytes=1000,
    engine=Proof(library="transformers", version="5", model="M", attention="A", cache_blocks=None),
    kl=0.01,
)
"""What a witness would say of a codec."""


def run_of(name, context=None, version="1", **counted) -> EvalRun:
    """What an eval of items of one length counted."""
    return EvalRun.of((LengthCounts(**counted),), quality_eval_id=name, version=version, context=context)


def recounted(run: EvalRun, **counts) -> EvalRun:
    """The same of an eval whose items are of one length, with other counts."""
    (one,) = run.lengths
    told = one.model_dump() | counts
    return run_of(run.quality_eval_id, run.context, run.version, **told)


def row(label, mechanism, variant, bits=None, stored=16.0, fires=0, drift=1.0, **changed) -> MechanismRow:
    """A variant that stores so many bits per value; over the needles `drift` times as many."""
    tokens = CONTEXT if changed.get("span", "context") == "context" else WINDOW
    values = VALUES // CONTEXT * tokens
    counted = {name: round(stored * items * values / 8) for name, items in SCORED.items()}
    runs = tuple(
        run_of(
            name,
            tokens=tokens,
            items=items,
            fires=fires * items,
            expected_fires=fires * items,
            kv_bytes=round(counted[name] * (drift if name == NEEDLE else 1)),
            kv_values=items * values,
        )
        for name, items in SCORED.items()
    )
    baseline = mechanism == BASELINE
    told = {
        "label": label,
        "mechanism": mechanism,
        "mechanism_variant": variant,
        "method": None if baseline else variant,
        "scope": None if baseline else "kv_cache",
        "bits": bits,
        "protocol": "snapshot",
        "span": "context",
        "recipe_id": IDENTITY.recipe_id if baseline else digest({"label": label}),
        "codec": variant if fires else None,
        "seconds": seconds(1.0 if baseline else 4.0),
        "compression_overhead_ms": 3.5 if fires else None,
        "decompression_overhead_ms": 1.5 if fires else None,
        "canary_kl": 2.0 if fires else None,
    }
    whole = told | PLAIN | runs[0].model_dump(include=set(RAN)) | changed
    whole.setdefault("throughput_tok_s", WINDOW / median(whole["seconds"]))
    return MechanismRow(**whole, evals=runs)


def scores(label, kl=0.0, disagreeing=0.0, lost=0, found=0.9, scatter=0.1) -> pl.DataFrame:
    """Scores of one variant: windows that lose `kl` nats within a tenth of it, and `lost` of the needles found."""
    rng = np.random.default_rng(sum(map(ord, label)))
    shape = 1 + scatter * rng.uniform(-1, 1, WINDOWS)
    plain = np.zeros(NEEDLES)
    plain[: round(found * NEEDLES)] = 1
    coded = plain.copy()
    coded[:lost] = 0
    ones = np.ones(WINDOWS)
    by_metric = {
        (FIDELITY, "kl"): (kl * shape, 0 * ones),
        (FIDELITY, "delta_nll"): (kl * shape[::-1], 0 * ones),
        (FIDELITY, "top1_agreement"): (1 - disagreeing * shape, ones),
        (NEEDLE, "needle_recall"): (coded, plain),
    }
    return pl.concat(
        pl.DataFrame(
            {
                "label": [label] * len(variant),
                "quality_eval_id": [name] * len(variant),
                "metric": [metric] * len(variant),
                "item": range(len(variant)),
                "variant": variant,
                "baseline": baseline,
            },
            schema=SCORES,
        )
        for (name, metric), (variant, baseline) in by_metric.items()
    )


BASE = row("baseline", BASELINE, "none")
GOOD = row("klt 4", "kv_compression", "klt", 4, 4.25, fires=6)
LOSSY = row("int 2", "kv_quantization", "int", 2, 2.5, fires=6)
OWN = row(
    "fp8_e4m3",
    "kv_quantization",
    "fp8_e4m3",
    stored=8.0,
    protocol="in_forward",
    span="window",
    kv_cache_dtype="fp8_e4m3",
    seconds=seconds(0.8),
)
PLAIN_POOL = Pool(
    block_tokens=128,
    block_bytes=128 * 2 * VALUES // CONTEXT,
    block_values=128 * VALUES // CONTEXT,
    cache_blocks=16,
    cache_memory_bytes=16 * 128 * 2 * VALUES // CONTEXT,
)
"""vLLM's own pages in bfloat16."""
PAGED = row(
    "klt 4 pages",
    "kv_compression",
    "klt_pages",
    4,
    4.25,
    fires=12,
    codec="klt",
    protocol="in_forward",
    span="window",
    kv_cache_dtype="uint8",
    cache_class="Pages",
    backend="kvlab.cache.pages.backend.PagesImpl",
    pool=PLAIN_POOL.model_copy(update={"block_bytes": PLAIN_POOL.block_bytes * 17 // 64, "cache_blocks": 60}),
    served=Served(recipe_id=digest({"label": "klt 4 pages"}), calibration=digest({"hf": "ca11"})),
)
ABSENT = Missing(
    label="fp8_e5m2", mechanism="kv_quantization", mechanism_variant="fp8_e5m2", reason="no AVX-512 |\n<b>here</b>"
)
QUALITY = {
    "baseline": {},
    "klt 4": {"kl": 0.002, "disagreeing": 0.01},
    "int 2": {"kl": 0.2, "disagreeing": 0.2, "lost": 80},
    "fp8_e4m3": {"kl": 0.0005, "disagreeing": 0.004},
    "klt 4 pages": {"kl": 0.002, "disagreeing": 0.01},
}


def table(*rows: MechanismRow, **quality) -> pl.DataFrame:
    """The scores of some rows; `quality` by label replaces what `QUALITY` says."""
    return pl.concat(scores(one.label, **(QUALITY | quality).get(one.label, {})) for one in rows)


def plant(folder: Path) -> dict[str, Path]:
    """The files of two engines, and what windows and needles say of themselves."""
    for engine, rows, missing in (("hf", (BASE, GOOD, LOSSY), ()), ("vllm", (BASE, GOOD, OWN), (ABSENT,))):
        write_mechanisms(folder / engine, record(engine, rows, missing), table(*rows))
    write_json(folder / "windows.json", {"model_hash": "5eed", "corpus_hash": "7e47", "windows": {"test": WINDOWS}})
    write_json(folder / "needles.json", {"model_hash": "5eed", "needles_hash": "2eed1e", "n": NEEDLES})
    write_json(folder / "ruler.json", {"model_hash": "5eed", "items_hash": "7ex7", "tasks": {}, "greedy": 0})
    return {name: folder / f"{name}.json" for name in ("hf", "vllm", "windows", "needles", "ruler")}


def read_back(folder: Path, rows: list[dict]) -> list[Row]:
    """The rows as the gate takes them from a file."""
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    return read_rows(file)


def claims(rows: list[Row], context: Context) -> dict:
    """What the gate says of each row, by its id."""
    return {claim.row["row_id"]: claim for claim in check(rows, context).claims}

"""What the calibration left, codebooks and Sigma_q; refused when made from another model than was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvlab.errors import MixedIdentity, StaleResult
from kvlab.recipe import BlockStream, digest
from kvlab.records import read_json
from kvlab.report.gather import Results
from kvlab.report.studies.counterparts import LEVELS


def read_codebooks(path: Path, results: Results) -> dict:
    """The codebooks' JSON; refused when it is of another model or lacks a table that a cell used."""
    codebooks = read_json(path)
    refuse_other_model(codebooks, path, results)
    used = {
        digest(stream)
        for measured in results.cells
        for stream in (measured.cell.stream_recipe("k"), measured.cell.stream_recipe("v"))
        if isinstance(stream, BlockStream)
    }
    missing = used - {table["stream_recipe_id"] for table in codebooks["tables"]}
    if missing:
        raise StaleResult(
            f"{path} has no table for stream recipe {', '.join(sorted(missing))}, which measured cells used;"
            " run `kvlab codebooks` and the jobs again"
        )
    return codebooks


def sigma_entry(paths: Sequence[Path], results: Results) -> dict:
    """Sigma_q per engine in a few numbers, and how far the engines' captures drift apart."""
    sidecars = {}
    for path in paths:
        sidecar = read_json(path)
        refuse_other_model(sidecar, path, results)
        if sidecar["calibration_source"] in sidecars:
            raise StaleResult(f"{path}: a second Sigma_q of engine {sidecar['calibration_source']!r}; remove one")
        sidecars[sidecar["calibration_source"]] = sidecar["diagnostics"]
    return {engine: sigma_summary(rows) for engine, rows in sidecars.items()} | {"drift": sigma_drift(sidecars)}


def refuse_other_model(artifact: dict, path: Path, results: Results) -> None:
    """`MixedIdentity` when a calibration artifact was made from another model than was measured."""
    measured = results.provenance.model_hash
    if artifact.get("model_hash") != measured:
        raise MixedIdentity({"model_hash": [f"{artifact.get('model_hash')} ({path})", f"{measured} (results)"]})


def sigma_summary(diagnostics: list[dict]) -> dict:
    """Medians and maxima over all layers and KV heads."""
    condition = np.array([row["condition"] for row in diagnostics])
    off_diagonal = np.array([row["off_diag_max_abs"] / row["diag_mean"] for row in diagnostics])
    return {
        "heads": len(diagnostics),
        "condition_median": float(np.median(condition)),
        "condition_max": float(condition.max()),
        "off_diagonal_ratio_median": float(np.median(off_diagonal)),
        "off_diagonal_ratio_max": float(off_diagonal.max()),
    }


def sigma_drift(sidecars: dict[str, list[dict]]) -> dict | None:
    """Relative difference of the trace of Sigma_q between the engines; None with one engine."""
    if set(sidecars) != set(LEVELS["engine"]):
        return None
    hf, vllm = (
        {(row["layer"], row["kv_head"]): row["sigma_trace"] for row in sidecars[engine]} for engine in LEVELS["engine"]
    )
    if set(hf) != set(vllm):
        raise MixedIdentity({"heads of Sigma_q": [f"hf: {len(hf)}", f"vllm: {len(vllm)}"]})
    relative = np.array([abs(vllm[head] / hf[head] - 1) for head in hf])
    return {"trace_difference_median": float(np.median(relative)), "trace_difference_max": float(relative.max())}

"""What the calibration left, codebooks and Sigma_q; refused when made from another model than was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvlab.errors import MixedIdentity, StaleResult
from kvlab.recipe import BlockStream, IsotropicStream, digest
from kvlab.records import read_json
from kvlab.report.gather import Results
from kvlab.report.studies.counterparts import LEVELS


def read_codebooks(paths: Sequence[Path], results: Results) -> list[dict]:
    """The codebooks, of one model and one text.

    Raises
    ------
    MixedIdentity
        They are of another model than was measured, or of several texts.
    """
    found = [(path, read_json(path)) for path in paths]
    for path, codebooks in found:
        refuse_other_model(codebooks, path, results)
    texts = {codebooks["corpus_hash"] for _, codebooks in found}
    if len(texts) > 1:
        raise MixedIdentity({"corpus_hash of the codebooks": texts})
    return [codebooks for _, codebooks in found]


def codebook_entries(several: list[dict], results: Results) -> list[dict]:
    """Every table that a cell used, once, with the origin and the studies that it was fitted for.

    Raises
    ------
    StaleResult
        A table that measured cells used is missing, or stands there twice with different numbers.
    """
    tables: dict[tuple, dict] = {}
    for codebooks in several:
        for table in codebooks["tables"]:
            found = {"origin": codebooks["origin"]} | table
            key = tuple(found[name] for name in ("origin", "stream", "placement", "stream_recipe_id"))
            if tables.setdefault(key, found)["centroids"] != found["centroids"]:
                raise StaleResult(f"table {'/'.join(key)} stands in two codebooks and differs; run `kvlab codebooks`")
    missing = sorted("/".join(key) for key in used_tables(results) - set(tables))
    if missing:
        raise StaleResult(f"no codebook holds table {missing[0]}, which measured cells used; run `kvlab codebooks`")
    return list(tables.values())


def used_tables(results: Results) -> set[tuple[str, str, str, str]]:
    """Origin, stream, placement and recipe of every fitted table that a measured cell used."""
    found = set()
    for cell in (measured.cell for measured in results.cells):
        for recipe in cell.recipes:
            for which in cell.stream:
                stream = getattr(recipe, which)
                stream = stream.of if isinstance(stream, IsotropicStream) else stream
                if isinstance(stream, BlockStream) and stream.codebook == "fitted":
                    placement = cell.placement if which == "k" else "pre_rope"
                    found.add((cell.origin, which, placement, digest(stream)))
    return found


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

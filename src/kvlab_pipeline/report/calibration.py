"""What the calibration left, codebooks and Sigma_q; refused when made from another model than was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvlab.calibration.needs import pieces
from kvlab.codecs.block.studied import coded_layers
from kvlab.core.errors import MixedIdentity, StaleResult
from kvlab.core.params import Params
from kvlab.core.records import file_hash, fingerprint, read_json
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab_pipeline.studies.baselines import LEVELS
from kvlab_pipeline.studies.measured import Results
from kvlab_pipeline.studies.tidy import COUNT, DECIBELS, RATIO, By, Estimand, Single

# Sigma_q of one engine's capture in a few numbers, over all layers and KV heads.
SIGMA = By(
    "engine",
    {
        "heads": Estimand(COUNT),
        "condition_median": Estimand(RATIO),
        "condition_max": Estimand(RATIO),
        "whitening_gain_db_median": Estimand(DECIBELS),
        "whitening_gain_db_max": Estimand(DECIBELS),
        "off_diagonal_ratio_median": Estimand(RATIO),
        "off_diagonal_ratio_max": Estimand(RATIO),
        "round_trip_error_median": Estimand(RATIO),
        "round_trip_error_max": Estimand(RATIO),
    },
)
# How far the trace of Sigma_q on vLLM's capture lies from that on transformers'.
DRIFT = Single(
    {
        "trace_ratio": By("layers", Estimand(RATIO)),
        "trace_difference_median": Estimand(RATIO),
        "trace_difference_max": Estimand(RATIO),
    }
)


def read_codebooks(paths: Sequence[Path], params: Params, results: Results) -> list[dict]:
    """The codebooks, of one model and one text, and fitted for what was measured.

    Raises
    ------
    MixedIdentity
        They are of another model or Sigma_q than was measured, or of several texts.
    StaleResult
        They were fitted on other layers than these parameters code.
    """
    found = [(path, read_json(path)) for path in paths]
    layers = list(coded_layers(params))
    for path, codebooks in found:
        refuse_other_model(codebooks, path, results)
        refuse_other_sigma(codebooks.get("sigma_hash"), codebooks["origin"], path, results)
        if codebooks.get("layers") != layers:
            raise StaleResult(
                f"{path} was fitted on layers {codebooks.get('layers')}, these parameters code {layers};"
                " run `kvlab step codebooks` and measure again",
                code="stale.other-layers",
            )
    texts = {codebooks["corpus_hash"] for _, codebooks in found}
    if len(texts) > 1:
        raise MixedIdentity({"corpus_hash of the codebooks": texts})
    return [codebooks for _, codebooks in found]


def codebook_entries(several: list[dict], results: Results) -> list[dict]:
    """Every table, with the origin that it was fitted on.

    Raises
    ------
    StaleResult
        A table that measured cells used is missing or another one than they used, or two files are of one origin.
    """
    tables: dict[tuple, dict] = {}
    for codebooks in several:
        for table in codebooks["tables"]:
            found = {"origin": codebooks["origin"]} | table
            key = tuple(found[name] for name in ("origin", "stream", "placement", "stream_recipe_id"))
            if tables.setdefault(key, found) is not found:
                raise StaleResult(
                    f"table {'/'.join(key)} stands in two codebooks; name one of each origin", code="stale.table-twice"
                )
    for key, made in sorted(used_tables(results).items()):
        if key not in tables:
            name = "/".join(key)
            raise StaleResult(
                f"no codebook holds table {name}, which measured cells used; run `kvlab step codebooks`",
                code="stale.no-table",
            )
        if fingerprint(np.array(tables[key]["centroids"], np.float32)) != made:
            raise StaleResult(
                f"table {'/'.join(key)} is not the one that measured cells used; measure them again",
                code="stale.other-table",
            )
    return list(tables.values())


def used_tables(results: Results) -> dict[tuple[str, str, str, str], str]:
    """Origin, stream, placement and recipe of every fitted table that a measured cell used -> its digest."""
    return {
        (measured.cell.origin, piece.stream, piece.placement, piece.place): measured.record.fitted[name]
        for measured in results.cells
        for name, piece in pieces(measured.cell).items()
        if piece.kind == "table"
    }


def sigma_entries(paths: Sequence[Path], results: Results, boot: Bootstrap) -> dict:
    """The parts ``sigma``, Sigma_q per engine in a few numbers, and ``sigma_drift``, how far captures drift apart.

    Raises
    ------
    MixedIdentity
        A Sigma_q is of another model or other windows than were measured, or not the one that cells read.
    StaleResult
        There are two of an engine.
    """
    sidecars = {}
    for path in paths:
        sidecar = read_sigma_sidecar(path, results)
        if (engine := sidecar["calibration_source"]) in sidecars:
            raise StaleResult(f"{path}: a second Sigma_q of engine {engine!r}; remove one", code="stale.twice")
        sidecars[engine] = sidecar
    entries = {engine: sigma_summary(sidecar["diagnostics"]) for engine, sidecar in sidecars.items()}
    return {"sigma": entries, "sigma_drift": sigma_drift(sidecars, boot)}


def read_sigma_sidecar(path: Path, results: Results) -> dict:
    """What lies beside a Sigma_q, if it is of what was measured.

    Its hash is held to the one that cells name, where any was calibrated on it, and to the file itself, where that
    lies beside the JSON.
    """
    sidecar = read_json(path)
    refuse_other_model(sidecar, path, results)
    written, measured = sidecar.get("corpus_hash"), results.provenance.corpus_hash
    if written != measured:
        raise MixedIdentity({"corpus_hash": [f"{written} ({path})", f"{measured} (results)"]})
    if (engine := sidecar["calibration_source"]) in results.provenance.calibration:
        refuse_other_sigma(sidecar.get("file_hash"), engine, path, results)
    beside = path.with_suffix(".safetensors")
    if beside.exists() and file_hash(beside) != sidecar.get("file_hash"):
        raise StaleResult(f"{path} is not about {beside.name}; run `kvlab step sigma`", code="stale.other-sigma")
    return sidecar


def refuse_other_model(artifact: dict, path: Path, results: Results) -> None:
    """`MixedIdentity` when a calibration artifact was made from another model than was measured."""
    measured = results.provenance.model_hash
    if artifact.get("model_hash") != measured:
        raise MixedIdentity({"model_hash": [f"{artifact.get('model_hash')} ({path})", f"{measured} (results)"]})


def refuse_other_sigma(found: str | None, origin: str, path: Path, results: Results) -> None:
    """`MixedIdentity` when a calibration artifact is of another Sigma_q than the cells of its origin read."""
    measured = results.provenance.calibration.get(origin)
    if found != measured:
        raise MixedIdentity({f"Sigma_q of {origin}": [f"{found} ({path})", f"{measured} (results)"]})


def sigma_summary(diagnostics: list[dict]) -> dict:
    """Medians and maxima over all layers and KV heads.

    `whitening_gain_db` is the ratio of the arithmetic to the geometric mean of Sigma_q's eigenvalues,
    `round_trip_error` what float32 loses of K on the way into the whitened frame and back, relative.
    """
    columns = {name: [row[name] for row in diagnostics] for name in ("condition", "whitening_gain_db")}
    columns["off_diagonal_ratio"] = [row["off_diag_max_abs"] / row["diag_mean"] for row in diagnostics]
    columns["round_trip_error"] = [row["round_trip_error"] for row in diagnostics]
    found: dict[str, float] = {"heads": len(diagnostics)}
    for name, values in columns.items():
        found |= {f"{name}_median": float(np.median(values)), f"{name}_max": float(np.max(values))}
    return found


def sigma_drift(sidecars: dict[str, dict], boot: Bootstrap) -> dict | None:
    """How the trace of Sigma_q differs between the engines; None with one engine.

    `trace_ratio` is vLLM's over HF's, of all layers and of each, pooled over the heads, with intervals over the
    captured windows, which are the same for both. The relative differences are those of single heads.
    """
    if set(sidecars) != set(LEVELS["engine"]):
        return None
    hf, vllm = (sidecars[engine] for engine in LEVELS["engine"])
    heads = [[(row["layer"], row["kv_head"]) for row in one["diagnostics"]] for one in (hf, vllm)]
    if heads[0] != heads[1]:
        raise MixedIdentity({"heads of Sigma_q": [f"hf: {len(heads[0])}", f"vllm: {len(heads[1])}"]})
    traces = [np.array([row["sigma_trace"] for row in one["diagnostics"]]) for one in (hf, vllm)]
    relative = abs(traces[1] / traces[0] - 1)
    return {
        "trace_ratio": trace_ratios(hf, vllm, boot),
        "trace_difference_median": float(np.median(relative)),
        "trace_difference_max": float(relative.max()),
    }


def trace_ratios(hf: dict, vllm: dict, boot: Bootstrap) -> dict[str, dict]:
    """vLLM's trace over HF's with its interval, of all layers and by layer."""
    layers = dict.fromkeys(row["layer"] for row in hf["diagnostics"])
    groups = {"all_layers": set(layers)} | {f"layer_{layer}": {layer} for layer in layers}
    return {name: boot.ratio(traces_of(vllm, group), traces_of(hf, group)).to_json() for name, group in groups.items()}


def traces_of(sidecar: dict, layers: set[int]) -> Column:
    """The traces of some layers' heads added up, by captured window."""
    rows = [row["window_traces"] for row in sidecar["diagnostics"] if row["layer"] in layers]
    sums = np.array(rows).sum(0)
    windows = np.arange(sums.size)
    return replace(Column.of(windows, np.zeros_like(windows), sums), n_tokens=sidecar["n_tokens_pooled"])

"""All numbers of the report, each with its interval: from result files to ``metrics.json``.

Nothing is measured here and nothing is worded. Every interval resamples the same windows, so cells that
are compared are paired; every comparison passes `gather.comparable` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from kvlab.errors import Fault, MissingResult, MixedIdentity, StaleResult
from kvlab.params import Params, studied_recipe
from kvlab.recipe import BlockStream, digest
from kvlab.records import machine, read_json
from kvlab.report.gather import Measured, Results, comparable, gather
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.multiple import benjamini_hochberg, sign_flip_p
from kvlab.stats.power import effective_tokens, predicted_standard_error, windows_for_sign
from kvlab.stats.shapley import corner_index, interactions, pairs, shapley
from kvlab.stats.slope import linear_range, log_log_slope

AGREEMENT_KL = 1e-6  # nats per token; fp32 engines without a codec may differ by rounding only
AGREEMENT_CODEC = 0.02  # relative; the same codec must cost the same on both engines in fp32
PERCENTILES = ("50", "95", "99", "99.9")
CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
# Low level first: the corner of the published HF study, and of the published vLLM study.
LEVELS = {"engine": ("hf", "vllm"), "protocol": ("snapshot", "in_forward")}


def build(
    params: Params,
    baseline_paths: Sequence[Path],
    job_paths: Sequence[Path],
    codebooks_path: Path,
    sigma_paths: Sequence[Path],
) -> dict:
    """The contents of ``metrics.json``.

    Parameters
    ----------
    params : Params
        Decides which cells there must be.
    baseline_paths, job_paths : sequence of Path
        JSON records of ``kvlab baseline`` and ``kvlab measure``, each with its parquet beside it.
    codebooks_path : Path
        JSON of ``kvlab codebooks``.
    sigma_paths : sequence of Path
        JSON sidecars of ``kvlab sigma``, one per engine.

    Returns
    -------
    dict
        JSON-ready; every interval is an ``Estimate.to_json``. KL and NLL are in nats per token.

    Raises
    ------
    kvlab.errors.Fault, kvlab.errors.UserError
        Whatever `gather` refuses, and codebooks or sidecars of another model or recipe.
    """
    results = gather(params, baseline_paths, job_paths)
    boot = Bootstrap(params.stats.resamples, params.stats.confidence, params.stats.seed)
    codebooks = read_codebooks(codebooks_path, results)
    agreement, why = agreement_entry(params, results, boot)
    return {
        "identity": identity_entry(params, results, codebooks),
        "sizes": {
            "context": params.windows.context,
            "eval": params.windows.eval,
            "windows": params.windows.test,
            "confidence": params.stats.confidence,
            "resamples": params.stats.resamples,
        },
        "floor": {engine: floor_entry(params, results, boot, engine) for engine in params.engines},
        "baseline": [baseline_entry(results, boot, run) for run in results.runs],
        "agreement": agreement,
        "agreement_why": why,
        "gap": gap_entry(params, results, boot),
        "cells": [cell_entry(results, boot, measured) for measured in results.select("cells")],
        "layers": layer_entries(params, results, boot),
        "additivity": additivity_entries(params, results, boot),
        "noise": [noise_entry(boot, measured) for measured in results.select("noise")],
        "noise_slope": noise_slope_entries(params, results, boot),
        "codebooks": codebooks["tables"],
        "sigma": sigma_entry(sigma_paths, results),
    }


# ------------------------------------------------------------------------------------- identity


def identity_entry(params: Params, results: Results, codebooks: dict) -> dict:
    """What every number was measured on, and the recipes behind the recipe ids.

    `calibration_corpus_hash` is the hash of the windows file that the calibration read; equal to
    `corpus_hash`, calibration and test are the two splits of one file, which are disjoint by its making.
    """
    recipes = {m.record.recipe_id: m.cell.recipe.model_dump(mode="json") for m in results.cells}
    return results.provenance.model_dump() | {
        "calibration_corpus_hash": codebooks.get("corpus_hash"),
        "calibration_origin": codebooks.get("origin"),
        "machine": machine(),
        "recipes": recipes,
        "model": params.model.path,
        "corpus": params.corpus.source,
    }


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


def refuse_other_model(artifact: dict, path: Path, results: Results) -> None:
    """`MixedIdentity` when a calibration artifact was made from another model than was measured."""
    measured = results.provenance.model_hash
    if artifact.get("model_hash") != measured:
        raise MixedIdentity({"model_hash": [f"{artifact.get('model_hash')} ({path})", f"{measured} (results)"]})


# ------------------------------------------------------------------------- engines, codec off


def floor_entry(params: Params, results: Results, boot: Bootstrap, engine: str) -> dict:
    """KL of an engine to itself in ``gap.dtype``: run again, and with an identity codec in place."""
    entry = {}
    for measured in results.select("cells", engine=engine, dtype=params.gap.dtype):
        if measured.role in ("rerun", "identity"):
            name = "rerun" if measured.role == "rerun" else f"identity_{measured.cell.protocol}"
            entry[name] = boot.mean(measured.column("kl")).to_json()
    return entry


def baseline_entry(results: Results, boot: Bootstrap, run: str) -> dict:
    """One engine, dtype and attention without codec, against the fp32 truth on the same tokens."""
    record = results.runs[run]
    return {
        "run": run,
        "engine": record.engine,
        "dtype": record.dtype,
        "attention": record.attention,
        "kl": boot.mean(results.run_column(run, "kl")).to_json(),
        "ppl_ratio": boot.exp_mean(results.run_column(run, "delta_nll")).to_json(),
        "top1_agreement": boot.rate(results.run_column(run, "top1_agreement")).to_json(),
    }


def agreement_entry(params: Params, results: Results, boot: Bootstrap) -> tuple[dict | None, list[str]]:
    """Whether the engines agree in float32, with and without the codec; None with one engine.

    They agree when, under every protocol, the identity cell's mean KL between the engines is below
    1e-6 nats, and the codec's own KL is not resolved to differ by more than 2 % of HF's: no interval of
    `relative_difference` (signed, vLLM minus HF over HF) lies wholly beyond. The interval decides because
    a codec's rounding carries a difference in the last bit up through the layers, so that the same engine,
    its K and V moved by 2^-22, lands about as far away; `jitter_kl` is that distance, to hold `cross_kl`
    against.
    """
    if set(params.engines) != set(LEVELS["engine"]):
        return None, [f"only {', '.join(params.engines)} was measured; agreement needs hf and vllm"]
    (run,) = [name for name, r in results.runs.items() if (r.engine, r.dtype) == ("vllm", "float32")]
    identity, codec, why = {}, {}, []
    for protocol in params.protocols:
        cross = boot.mean(results.run_column(run, "kl", "identity", protocol))
        identity[protocol] = cross.to_json()
        if not cross.value < AGREEMENT_KL:
            why.append(f"{protocol}: without codec the engines differ by KL {cross.value:.2g}, over {AGREEMENT_KL:g}")
        codec[protocol] = codec_agreement(params, results, boot, run, protocol)
        low, high = (codec[protocol]["relative_difference"][end] for end in ("low", "high"))
        if low > AGREEMENT_CODEC or high < -AGREEMENT_CODEC:
            why.append(f"{protocol}: the codec's KL differs by {low:.1%} to {high:.1%}, over {AGREEMENT_CODEC:.0%}")
    return {"identity": identity, "codec": codec, "holds": not why, "why": why}, why


def codec_agreement(params: Params, results: Results, boot: Bootstrap, run: str, protocol: str) -> dict:
    """The codec in float32 on both engines: KL between them, each one's own KL, their difference."""
    cells = [codec_cell(params, results, engine, protocol, "float32") for engine in LEVELS["engine"]]
    comparable(cells, {"engine"})
    columns = [measured.column("kl") for measured in cells]
    return {
        "cross_kl": boot.mean(results.run_column(run, "kl", "kv", protocol)).to_json(),
        "jitter_kl": boot.mean(results.run_column(run, "kl", "jitter", protocol)).to_json(),
        "hf_kl": boot.mean(columns[0]).value,
        "vllm_kl": boot.mean(columns[1]).value,
        "relative_difference": boot.combine(columns, lambda m: m[..., 1] / m[..., 0] - 1).to_json(),
    }


def codec_cell(
    params: Params, results: Results, engine: str, protocol: str, dtype: str, ratio: float | None = None
) -> Measured:
    """The one cell that codes both streams with the studied recipe, at `ratio` if given."""
    found = results.select(
        "cells",
        engine=engine,
        protocol=protocol,
        dtype=dtype,
        stream="kv",
        recipe=studied_recipe(params, ratio),
    )
    if len(found) != 1:
        raise MissingResult(f"{len(found)} cells of {engine}, {dtype}, {protocol} run the studied recipe at {ratio}")
    return found[0]


# ------------------------------------------------------------------------------------------ gap


def gap_entry(params: Params, results: Results, boot: Bootstrap) -> dict:
    """The gap between the low and the high corner, divided among the factors by Shapley value.

    A factor with one level (one engine measured, one protocol, equal ratios) is dropped; the corners
    still name it. KL is not net of the floor here: both corners carry their engine's.
    """
    levels = gap_levels(params)
    factors = [name for name, values in levels.items() if len(values) > 1]
    corners = [dict(zip(levels, choice, strict=True)) for choice in product(*levels.values())]
    cells = [
        codec_cell(params, results, c["engine"], c["protocol"], params.gap.dtype, c["variance_ratio"]) for c in corners
    ]
    comparable(cells, factors)
    index = [corner_index([corner[name] != levels[name][0] for name in factors]) for corner in corners]
    order = [index.index(i) for i in range(len(corners))]
    measures = {}
    for quantity in ("kl", "delta_nll"):
        columns = [cells[i].column(quantity) for i in order]
        measures[quantity] = decompose(boot, columns, factors, [corners[i] for i in order])
    return {
        "factors": factors,
        "dtype": params.gap.dtype,
        "stream": "kv",
        "low": {name: values[0] for name, values in levels.items()},
        "high": {name: values[-1] for name, values in levels.items()},
        "measures": measures,
    }


def gap_levels(params: Params) -> dict[str, list]:
    """Levels of each factor, low first; only those that were measured."""
    levels: dict[str, list] = {
        name: [level for level in both if level in getattr(params, f"{name}s")] for name, both in LEVELS.items()
    }
    return levels | {"variance_ratio": list(dict.fromkeys(params.gap.variance_ratios))}


def decompose(boot: Bootstrap, columns: list[Column], factors: list[str], corners: list[dict]) -> dict:
    """Corner values, gap, each factor's share and each pair's interaction, all over the same resamples.

    Parameters
    ----------
    boot : Bootstrap
    columns : list of Column, paired
        By corner index (`stats.shapley`).
    factors : list of str
        By bit of the corner index.
    corners : list of dict
        The levels of each corner, in the order of `columns`.
    """
    values = boot.combine_many(columns, lambda m: m)
    shares = boot.combine_many(columns, shapley) if factors else []
    effects = boot.combine_many(columns, interactions) if len(factors) > 1 else []
    names = [[factors[i], factors[j]] for i, j in pairs(len(factors))]
    return {
        "low": values[0].to_json(),
        "high": values[-1].to_json(),
        "gap": boot.difference(columns[-1], columns[0]).to_json(),
        "parts": [
            {"factor": name, "share": share.to_json(), "windows_needed": windows_for_sign(share)}
            for name, share in zip(factors, shares, strict=True)
        ],
        "interactions": [{"factors": n, "effect": e.to_json()} for n, e in zip(names, effects, strict=True)],
        "corners": [corner | {"value": value.to_json()} for corner, value in zip(corners, values, strict=True)],
    }


# ---------------------------------------------------------------------------------------- cells


def cell_entry(results: Results, boot: Bootstrap, measured: Measured) -> dict:
    """Everything about one cell: what it is, what its codec did, and what it cost."""
    cell, coding = measured.cell, measured.record.coding
    coded = cell.recipe.k if measured.role == "codec" else None
    ranks = {stream: _mean_of_counts(coding.d_eff.get(stream)) for stream in ("k", "v")}
    return {
        "cell_id": measured.record.cell_id,
        "recipe_id": measured.record.recipe_id,
        "role": measured.role,
        "label": cell.label,
        "engine": cell.engine,
        "dtype": cell.dtype,
        "protocol": cell.protocol,
        "stream": cell.stream,
        "variance_ratio": coded.variance_ratio if coded else None,
        "bits_per_value": coding.bits_per_value,
        "fires": coding.fires,
        "expected_fires": coding.expected_fires,
        "canary_kl": measured.record.canary_kl,
        "d_eff_mean": ranks,
        "outlier_rate": {stream: coding.outlier_rate.get(stream) for stream in ("k", "v")},
        "whitened_error": {stream: coding.whitened_error.get(stream) for stream in ("k", "v")},
        **cell_estimates(results, boot, measured),
        "kl_percentiles": percentiles(measured),
        "kl_by_confidence": by_confidence(measured),
    }


def _mean_of_counts(counts: dict[int, int] | None) -> float | None:
    return sum(value * n for value, n in counts.items()) / sum(counts.values()) if counts else None


def cell_estimates(results: Results, boot: Bootstrap, measured: Measured) -> dict:
    """The cell's intervals.

    `kl_net` is paired with the identity cell of the same engine, dtype and protocol, and None where
    there is none. `published_estimator` is the published study's: the unweighted mean over windows of
    the signed relative change in perplexity; it is for comparison and no verdict reads it.
    `predicted_standard_error` is that of mean delta_nll as the KL predicts it (`stats.power`).
    """
    kl, delta = measured.column("kl"), measured.column("delta_nll")
    mean_kl = boot.mean(kl)
    floor = identity_of(results, measured)
    n_eff = effective_tokens(delta, measured.column("delta_nll_squared"))
    rates = ("top1_agreement", "flips_to_wrong", "flips_to_right")
    return {
        "kl": mean_kl.to_json(),
        "kl_net": boot.difference(kl, floor.column("kl")).to_json() if floor else None,
        "delta_nll": boot.mean(delta).to_json(),
        "ppl_ratio": boot.exp_mean(delta).to_json(),
        "published_estimator": boot.mean(delta.per_window(np.expm1)).to_json(),
        "effective_tokens": n_eff,
        "predicted_standard_error": predicted_standard_error(mean_kl.value, n_eff),
    } | {name: boot.rate(measured.column(name)).to_json() for name in rates}


def identity_of(results: Results, measured: Measured) -> Measured | None:
    """The identity cell that says what the engine does without a codec under the same conditions."""
    cell = measured.cell
    found = results.select("cells", "identity", engine=cell.engine, dtype=cell.dtype, protocol=cell.protocol)
    if not found:
        return None
    comparable([measured, found[0]], {"recipe", "layers", "stream", "windows"})
    return found[0]


def percentiles(measured: Measured) -> dict[str, float]:
    """KL that the given percentage of tokens stays below, nats."""
    values = np.percentile(measured.tokens["kl"].to_numpy(), [float(rank) for rank in PERCENTILES])
    return dict(zip(PERCENTILES, values.tolist(), strict=True))


def by_confidence(measured: Measured) -> list[dict]:
    """Mean KL by the reference's largest probability; bins are [low, high), the last one closed."""
    kl, p_max = (measured.tokens[name].to_numpy() for name in ("kl", "p_ref_max"))
    bins = np.clip(np.digitize(p_max, CONFIDENCE_EDGES) - 1, 0, len(CONFIDENCE_EDGES) - 2)
    entries = []
    for i, (low, high) in enumerate(pairwise(CONFIDENCE_EDGES)):
        inside = kl[bins == i]
        mean = float(inside.mean()) if inside.size else None
        entries.append({"low": low, "high": high, "kl": mean, "n_tokens": int(inside.size)})
    return entries


# --------------------------------------------------------------------------------------- layers


def layer_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """KL of coding one layer at a time, with q-values over the layers of one engine and protocol.

    KL is never negative, so "no effect" cannot mean KL = 0. The null hypothesis is that coding the
    layer is exchangeable, window by window, with the engine's identity cell of the same dtype and
    protocol; the test flips signs of the paired window differences (`stats.multiple.sign_flip_p`).
    Where there is no such identity cell there is no q-value, nor for all layers together.
    """
    entries = []
    for engine, protocol in product(params.engines, params.layers.protocols):
        singles, joint = layer_cells(results, engine, protocol)
        p_values = [layer_p(results, boot, measured) for measured in singles]
        tested = all(p is not None for p in p_values)
        q_values = benjamini_hochberg(p_values).tolist() if tested else [None] * len(singles)
        for measured, q_value in zip([*singles, joint], [*q_values, None], strict=True):
            entry = {
                "engine": engine,
                "protocol": protocol,
                "label": measured.cell.label,
                "layer": None if measured is joint else measured.cell.layers[0],
                "kl": boot.mean(measured.column("kl")).to_json(),
                "q_value": q_value,
                "bits_per_value": measured.record.coding.bits_per_value,
            }
            entries.append(entry)
    return entries


def layer_cells(results: Results, engine: str, protocol: str) -> tuple[list[Measured], Measured]:
    """The single layers in order, and the cell of all layers (which may be the only layer)."""
    found = results.select("layers", engine=engine, protocol=protocol)
    comparable(found, {"layers"})
    joint = max(found, key=lambda m: len(m.cell.layers))
    singles = [m for m in found if len(m.cell.layers) == 1]
    return sorted(singles, key=lambda m: m.cell.layers), joint


def layer_p(results: Results, boot: Bootstrap, measured: Measured) -> float | None:
    """p-value of one layer against the identity cell; None where there is none."""
    floor = identity_of(results, measured)
    if floor is None:
        return None
    difference = measured.column("kl").means - floor.column("kl", measured.cell.windows).means
    return sign_flip_p(difference, draws=boot.resamples, seed=boot.seed)


def additivity_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """All layers together against the sum of the single layers, paired by window.

    Each KL is net of the identity cell's where there is one: a sum over layers would otherwise count
    the engine's own noise once per layer. The ratio is None when the sum is not clear of zero.
    """
    entries = []
    for engine, protocol in product(params.engines, params.layers.protocols):
        singles, joint = layer_cells(results, engine, protocol)
        floor = identity_of(results, joint)
        columns = [measured.column("kl") for measured in (joint, *singles)]
        columns += [floor.column("kl", joint.cell.windows)] if floor else []
        n = len(singles)

        def parts(means, n=n, net=floor is not None):
            noise = means[..., -1] if net else 0.0
            return means[..., 0] - noise, means[..., 1 : n + 1].sum(-1) - n * noise

        total = boot.combine(columns, lambda m, parts=parts: parts(m)[1])
        ratio = boot.combine(columns, lambda m, parts=parts: np.divide(*parts(m))) if total.low > 0 else None
        entry = {
            "engine": engine,
            "protocol": protocol,
            "joint": boot.combine(columns, lambda m, parts=parts: parts(m)[0]).to_json(),
            "sum": total.to_json(),
            "ratio": ratio.to_json() if ratio else None,
            "interaction": boot.combine(columns, lambda m, parts=parts: np.subtract(*parts(m))).to_json(),
        }
        entries.append(entry)
    return entries


# ---------------------------------------------------------------------------------------- noise


def noise_entry(boot: Bootstrap, measured: Measured) -> dict:
    """KL of one size of Gaussian noise on one stream."""
    return {
        "engine": measured.cell.engine,
        "stream": measured.cell.stream,
        "sigma": measured.cell.recipe.k.sigma,
        "kl": boot.mean(measured.column("kl")).to_json(),
    }


def noise_slope_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """Exponent of KL against sigma per engine and stream, over the range where a power law holds.

    The range is chosen by `stats.slope.linear_range`; None where fewer than two points lie in it.
    """
    entries = []
    for engine, stream in product(params.engines, params.noise.streams):
        found = results.select("noise", engine=engine, stream=stream)
        found = sorted(found, key=lambda m: m.cell.recipe.k.sigma)
        comparable(found, {"sigma"})
        floor = identity_of(results, found[0])
        level = boot.mean(floor.column("kl", found[0].cell.windows)).value if floor else 0.0
        columns = [measured.column("kl") for measured in found]
        sigmas = np.array([measured.cell.recipe.k.sigma for measured in found])
        inside = np.flatnonzero(linear_range([boot.mean(c).value for c in columns], level) & (sigmas > 0))
        slope: Estimate | None = None
        if inside.size >= 2:
            slope = log_log_slope(boot, sigmas[inside], [columns[i] for i in inside])
        entry = {
            "engine": engine,
            "stream": stream,
            "slope": slope.to_json() if slope else None,
            "range": [float(sigmas[inside[0]]), float(sigmas[inside[-1]])] if slope else None,
        }
        entries.append(entry)
    return entries


# ------------------------------------------------------------------------------------- Sigma_q


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


# -------------------------------------------------------------------------------------- summary


def summary(metrics: dict) -> dict:
    """A dozen headline scalars of ``metrics.json``, flat, for a table of experiments.

    Raises
    ------
    Fault
        When the metrics hold no decomposition.
    """
    if not metrics.get("gap"):
        raise Fault("these metrics hold no decomposition of the gap")
    kl = metrics["gap"]["measures"]["kl"]
    delta = metrics["gap"]["measures"]["delta_nll"]
    found = {f"kl.{name}": kl[name]["value"] for name in ("low", "high", "gap")}
    found |= {f"kl.gap.{end}": kl["gap"][end] for end in ("low", "high")}
    found |= {f"kl.share.{part['factor']}": part["share"]["value"] for part in kl["parts"]}
    found["delta_nll.gap"] = delta["gap"]["value"]
    coded = [c for c in metrics["cells"] if c["role"] == "codec" and c["dtype"] == metrics["gap"]["dtype"]]
    found["bits_per_value.min"] = min(cell["bits_per_value"] for cell in coded)
    for row in metrics["additivity"]:
        if row["ratio"]:
            found[f"additivity.{row['engine']}.{row['protocol']}"] = row["ratio"]["value"]
    if metrics["agreement"]:
        found["engines_agree"] = metrics["agreement"]["holds"]
    return found

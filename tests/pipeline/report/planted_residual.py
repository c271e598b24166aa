"""Residual studies with planted errors: what `kvlab step residual` would leave for each captured engine."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import polars as pl

from kvlab.core.params import Params
from kvlab.core.records import Provenance
from kvlab_pipeline.studies.residual.record import (
    RESIDUAL,
    STREAMS,
    RankCounts,
    ResidualRecord,
    recipes,
    write_residual,
)
from pipeline.report.planted_identity import SIGMAS, VERSIONS, provenance

HEADS, HEAD_DIM = 2, 64
RELATIVE = {"k": 0.02, "v": 0.06}
WHITENED = 0.25  # of the raw error


def planted_provenance(params: Params, **changes) -> Provenance:
    """The identity of a planted study, which is fitted on one capture."""
    origin = params.calibration.origin
    return provenance(**{"calibration": {origin: SIGMAS[origin]}} | changes)


def planted_record(params: Params, engine: str, d_eff: tuple[RankCounts, ...], **changes) -> ResidualRecord:
    """The record of one engine."""
    values = {
        "provenance": planted_provenance(params),
        "engine": engine,
        "dtype": "float32",
        "captured_with": VERSIONS,
        "origin": params.calibration.origin,
        "context": params.windows.context,
        "windows": params.windows.calib,
        "n_layers": params.model.n_layers,
        "boundary_layers": params.codec.boundary_layers,
        "recipes": recipes(params),
        "d_eff": d_eff,
    }
    return ResidualRecord(**values | changes)


def planted_rows(
    params: Params, factor: float = 1.0, layers: tuple[int, ...] | None = None, jitter: float = 0.0, seed: int = 1
) -> pl.DataFrame:
    """A table whose errors are `factor` times the planted ones in some layers (all), jittered by window."""
    shared, own = np.random.default_rng(0), np.random.default_rng(seed)
    rows = []
    windows, values = range(params.windows.calib), params.windows.context * HEADS * HEAD_DIM
    ratios = [recipe.variance_ratio for recipe in recipes(params)]
    for ratio, layer, stream, window in product(ratios, range(params.model.n_layers), STREAMS, windows):
        spread, moved = shared.lognormal(0, 0.2), own.lognormal(0, jitter) if jitter else 1.0
        here = factor if layers is None or layer in layers else 1.0
        signal = 100.0 * (layer + 1)
        error = signal * RELATIVE[stream] * spread * moved * here
        rank = 32 if ratio == 1 else 4 + window % 3
        whitened = WHITENED if stream == "k" else 1.0
        rows.append(
            {
                "variance_ratio": ratio,
                "layer": layer,
                "stream": stream,
                "window": window,
                "raw_error_sq": error,
                "raw_signal_sq": signal,
                "whitened_error_sq": whitened * error,
                "whitened_signal_sq": signal,
                "bytes": values // 2,
                "values": values,
                "n_outliers": 40 if stream == "k" else 0,
                "n_coefficients": 1000,
                "n_blocks": HEADS,
                "d_eff_sum": HEADS * rank,
            }
        )
    return pl.DataFrame(rows, schema=RESIDUAL)


def planted_ranks(rows: pl.DataFrame) -> tuple[RankCounts, ...]:
    """The histograms of a table in which both blocks of a tensor keep the same rank."""
    windows, found = 1 + rows["window"].max(), {}
    for row in rows.iter_rows(named=True):
        blocks = found.setdefault((row["variance_ratio"], row["layer"], row["stream"]), {})
        blocks.setdefault(row["d_eff_sum"] // HEADS, [0] * windows)[row["window"]] += HEADS
    return tuple(RankCounts(variance_ratio=r, layer=n, stream=s, blocks=b) for (r, n, s), b in found.items())


def write_residuals(folder: Path, params: Params, vllm: pl.DataFrame | None = None, **changes) -> list[Path]:
    """Every captured engine's study; `vllm` is the table of that engine, `changes` are fields of the last record."""
    paths = []
    for engine in params.calibration.engines:
        rows = vllm if engine == "vllm" and vllm is not None else planted_rows(params)
        last = engine == params.calibration.engines[-1]
        record = planted_record(params, engine, planted_ranks(rows), **(changes if last else {}))
        paths.append(Path(folder) / f"{engine}.json")
        write_residual(paths[-1], record, rows)
    return paths

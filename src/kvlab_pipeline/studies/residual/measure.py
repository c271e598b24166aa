"""The codec's own error on the K and V that each engine captured; no model runs.

If two engines' K and V were unlike enough for the codec to do worse on one, it would show here, before any
attention is computed. One codec, calibrated once, codes the context of every sampled window through its real
stream. K and V are those of the capture's sample, rounded to bfloat16 as a cache holds them, which is also what the
error is measured against. The windows are those of the calibration split, and one of the captures is the one that
fitted Sigma_q and the tables: these are errors of the codec where it knows the text, not what it costs the model.

The published study did this on four passages and kept the error after the whitening only (its phase 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import polars as pl
import torch
from tqdm import tqdm

from kvlab.calibration import load as calibration
from kvlab.calibration.capture import Captured
from kvlab.calibration.facts import checked
from kvlab.calibration.load import Calibrated, FittedFiles
from kvlab.codecs.base import Codec, Site
from kvlab.codecs.registry import build
from kvlab.codecs.shared.whitening import Whitener
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.records import Provenance, versions
from kvlab.measure.coding import squares
from kvlab_pipeline.studies.residual.record import (
    RESIDUAL,
    STREAMS,
    RankCounts,
    RatioRecipe,
    ResidualRecord,
    recipes,
    write_residual,
)


def residual(params: Params, capture_path: Path, fitted: FittedFiles, out: Path) -> None:
    """Code the contexts of one engine's capture and write ``.parquet`` and ``.json``; see `residual.record`.

    All layers are coded, those that the studied recipe leaves alone too. One layer's K or V is in memory at a
    time.

    Raises
    ------
    CalibrationMismatch
        The calibration is of another model, of other windows, or of another engine's capture than
        ``calibration.origin``; or has no table for a recipe.
    NonFinite
        A captured tensor overflows the codec's half precision.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    made = checked(captured.metadata, captured.path, {"device": str, "versions": dict}, "capture")
    calibrated = calibration.load(fitted, info.model_hash, captured.metadata["corpus_hash"])
    if calibrated.origin != params.calibration.origin:
        raise CalibrationMismatch(
            f"{fitted.sigma} was fitted on the capture of {calibrated.origin!r}, calibration.origin is"
            f" {params.calibration.origin!r}; give that one's",
            code="calibration.other-origin",
        )
    planned = recipes(params)
    found = list(coded(captured, planned, calibrated))
    record = ResidualRecord(
        provenance=Provenance(
            model=info.slug,
            model_hash=info.model_hash,
            corpus_hash=captured.metadata["corpus_hash"],
            calibration={calibrated.origin: calibrated.sigma_hash},
            versions=versions(),
            device=made["device"],
        ),
        engine=captured.metadata["engine"],
        dtype=captured.dtype,
        captured_with=made["versions"],
        origin=calibrated.origin,
        context=captured.context,
        windows=len(captured.sampled),
        n_layers=info.n_layers,
        boundary_layers=params.codec.boundary_layers,
        recipes=planned,
        d_eff=histograms(found),
    )
    write_residual(out, record, table(found))


@dataclass(frozen=True)
class CodedTensor:
    """One row of the table, and the kept rank of every block."""

    row: dict
    d_eff: tuple[int, ...]


def coded(captured: Captured, planned: tuple[RatioRecipe, ...], calibrated: Calibrated) -> Iterator[CodedTensor]:
    """Every layer, stream, recipe and sampled window of a capture."""
    codecs = {
        (ratio.variance_ratio, which): build(ratio.stream(which), calibrated.stream(ratio.stream(which), which))
        for ratio, which in product(planned, STREAMS)
    }
    places = list(product(range(captured.n_layers), STREAMS))
    for layer, which in tqdm(places, desc=f"residual {captured.metadata['engine']}", unit="tensor"):
        contexts = captured.layer(layer, which)
        whitener = calibrated.whiteners[layer] if which == "k" else None
        for ratio, (window, x) in product(planned, enumerate(contexts)):
            site = Site(window, layer, which)
            yield code(codecs[ratio.variance_ratio, which], x, site, whitener, ratio.variance_ratio)


def code(codec: Codec, x: torch.Tensor, site: Site, whitener: Whitener | None, variance_ratio: float) -> CodedTensor:
    """Take one tensor through the codec's stream and back.

    Parameters
    ----------
    codec : Codec
        What codes it.
    x : Tensor
        [heads, tokens, head_dim].
    site : Site
        Where it was captured.
    whitener : Whitener or None
        The metric of the whitened error, whether or not the codec whitens; None: the plain one.
    variance_ratio : float
        For the row.
    """
    encoded = codec.encode(x, site)
    data = frame_bytes(encoded)
    decoded = codec.decode(read_frame(data))
    raw = squares(x, decoded, None)
    whitened = squares(x, decoded, whitener.whiten) if whitener else raw
    stats = encoded.stats
    row = {
        "variance_ratio": variance_ratio,
        "layer": site.layer,
        "stream": site.stream,
        "window": site.window,
        "raw_error_sq": raw[0],
        "raw_signal_sq": raw[1],
        "whitened_error_sq": whitened[0],
        "whitened_signal_sq": whitened[1],
        "bytes": len(data),
        "values": x.numel(),
        "n_outliers": stats.n_outliers,
        "n_coefficients": stats.n_coefficients,
        "n_blocks": len(stats.d_eff),
        "d_eff_sum": sum(stats.d_eff),
    }
    return CodedTensor(row, stats.d_eff)


def table(found: list[CodedTensor]) -> pl.DataFrame:
    """The rows as the table that is written."""
    return pl.DataFrame([one.row for one in found], schema=RESIDUAL)


def histograms(found: list[CodedTensor]) -> tuple[RankCounts, ...]:
    """Blocks by kept rank and window, per variance ratio, layer and stream."""
    windows = 1 + max(one.row["window"] for one in found)
    counts: dict[tuple, dict[int, list[int]]] = {}
    for one in found:
        place = counts.setdefault(tuple(one.row[key] for key in ("variance_ratio", "layer", "stream")), {})
        for rank in one.d_eff:
            place.setdefault(rank, [0] * windows)[one.row["window"]] += 1
    return tuple(
        RankCounts(variance_ratio=ratio, layer=layer, stream=stream, blocks=dict(sorted(blocks.items())))
        for (ratio, layer, stream), blocks in counts.items()
    )

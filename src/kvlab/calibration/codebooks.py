"""Lloyd-Max tables fitted on the exact variable that the quantiser will meet.

The published tables were fitted on another variable than the one that is coded (full rank, no k-means
step) and are worse than the Gaussian ones on the true one. Here the codec itself is run on the calibration
contexts, and its own normalised residuals are pooled: same rank, same k-means, same outlier threshold,
same blocks, same heads. One table per stream and variance ratio, because the ratio changes the rank.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.calibration.capture import Captured
from kvlab.calibration.sigma import load_whiteners
from kvlab.codec import quantizer
from kvlab.codec.base import Site, StreamCalibration
from kvlab.codec.published import write_centroids
from kvlab.codec.registry import build
from kvlab.codec.whitening import Whitener
from kvlab.model import resolve
from kvlab.params import Params, coded_layers, studied_recipe
from kvlab.recipe import BlockStream, digest
from kvlab.records import write_json

POOL_LIMIT = 5_000_000


def variance_ratios(params: Params) -> list[float]:
    """The ratios that any cell uses."""
    return sorted({params.codec.variance_ratio, *params.gap.variance_ratios})


def fit_codebooks(params: Params, capture_path: Path, sigma_path: Path, out: Path) -> None:
    """Fit the table of every stream and variance ratio; write the ``.json`` and one ``.f32`` each.

    A ``.f32`` file is a table in the published format of `codec.published`. It lies in a folder named like
    the json, as ``K_vr1.f32``.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    whiteners = load_whiteners(sigma_path, info.model_hash)
    out = Path(out)
    tables = []
    for ratio in variance_ratios(params):
        recipe = studied_recipe(params, ratio)
        for stream, stream_recipe in (("k", recipe.k), ("v", recipe.v)):
            name = f"{stream.upper()}_vr{ratio:g}"
            pool = residual_pool(stream_recipe, stream, captured, whiteners, coded_layers(params), name)
            table = fit_table(stream_recipe, stream, pool) | {"name": name, "file": f"{name}.f32"}
            write_centroids(out.with_suffix("") / table["file"], torch.tensor(table["centroids"]))
            tables.append(table)
    write_json(
        out,
        {
            "model_hash": info.model_hash,
            "corpus_hash": captured.metadata["corpus_hash"],
            "origin": captured.metadata["engine"],
            "layers": list(coded_layers(params)),
            "tables": tables,
        },
    )


def residual_pool(
    recipe: BlockStream,
    stream: str,
    captured: Captured,
    whiteners: dict[int, Whitener],
    layers: tuple[int, ...],
    name: str,
) -> torch.Tensor:
    """Normalised residuals of all calibration contexts and coded layers, float32, one dimension.

    Raises
    ------
    NonFinite
        A captured tensor overflows the codec's half precision.
    """
    gaussian = recipe.model_copy(update={"codebook": "gaussian"})  # the table is what we are looking for
    codec = build(gaussian, StreamCalibration(whiteners=whiteners, centroids=None))
    parts = []
    for layer in tqdm(layers, desc=f"residuals {name}", unit="layer"):
        x = captured.layer(layer, stream)[:, :, : captured.context]
        parts += [codec.residuals(window, Site(i, layer, stream)).flatten() for i, window in enumerate(x)]
    pool = torch.cat(parts)
    if pool.numel() > POOL_LIMIT:
        keep = torch.randperm(pool.numel(), generator=torch.Generator().manual_seed(0))[:POOL_LIMIT]
        pool = pool[keep]
    return pool


def fit_table(recipe: BlockStream, stream: str, pool: torch.Tensor) -> dict:
    """Table and diagnostics of one stream; a Gaussian recipe keeps the Gaussian table."""
    gaussian = quantizer.gaussian_table(recipe.bits)
    fitted = quantizer.fit(pool, recipe.bits) if recipe.codebook == "fitted" else gaussian
    return {
        "stream": stream,
        "stream_recipe_id": digest(recipe),
        "bits": recipe.bits,
        "variance_ratio": recipe.variance_ratio,
        "layout": recipe.layout,
        "centroids": [float(c) for c in fitted.float()],
        "n_samples": pool.numel(),
        "std": float(pool.double().std()),
        "mse_gaussian": pool_mse(pool, gaussian),
        "mse_fitted": pool_mse(pool, fitted),
    }


def pool_mse(pool: torch.Tensor, table: torch.Tensor) -> float:
    """Mean squared error of a table on the pool."""
    table = table.to(pool.dtype)
    return float((pool - table[quantizer.quantise(pool, table)]).double().square().mean())

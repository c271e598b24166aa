"""Lloyd-Max tables fitted on the exact variable that the quantiser will meet.

The published tables were fitted on another variable than the one that is coded (full rank, no k-means
step) and are worse than the Gaussian ones on the true one. Here the codec itself is run on the calibration
contexts, and its own normalised residuals are pooled: same rank, same k-means, same outlier threshold,
same blocks, same heads. One table per recipe of a stream, because everything in it changes that variable.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.calibration.capture import Captured
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.sigma import load_whiteners
from kvlab.codec import quantizer
from kvlab.codec.base import Site, StreamCalibration
from kvlab.codec.metric import rotated
from kvlab.codec.published import write_centroids
from kvlab.codec.registry import build
from kvlab.codec.whitening import Whitener
from kvlab.errors import CalibrationMismatch
from kvlab.experiments.plan import fittings
from kvlab.model import resolve
from kvlab.params import Params, coded_layers
from kvlab.recipe import BlockStream, digest
from kvlab.records import file_hash, write_json

POOL_LIMIT = 5_000_000


def fit_codebooks(
    params: Params, study: str, capture_path: Path, sigma_path: Path, rotated_path: Path | None, out: Path
) -> None:
    """Fit every table that a study's cells read from this capture; write the ``.json`` and one ``.f32`` each.

    A ``.f32`` file is a table in the published format of `codec.published`. It lies in a folder named like
    the json, as ``K_<id of the stream's recipe>.f32``.

    Raises
    ------
    CalibrationMismatch
        The study codes K behind its rotary embedding and no `rotated_path` is given.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    whiteners = {"pre_rope": load_whiteners(sigma_path, info.model_hash)}
    if rotated_path is not None:
        whiteners["post_rope"] = load_whiteners(rotated_path, info.model_hash)
    angles = ErrorMetrics(info, captured.context).angles
    out = Path(out)
    tables = []
    for which, placement, recipe in fittings(params, study, captured.metadata["engine"]):
        if placement not in whiteners:
            raise CalibrationMismatch(f"study {study!r} codes K {placement}; name its Sigma_q with --rotated")
        turn = angles if placement == "post_rope" else None
        name = f"{which.upper()}_{digest(recipe)}" + ("_post_rope" if turn else "")
        pool = residual_pool(recipe, which, captured, whiteners[placement], coded_layers(params), turn, name)
        table = fit_table(recipe, which, pool) | {"placement": placement, "name": name, "file": f"{name}.f32"}
        write_centroids(out.with_suffix("") / table["file"], torch.tensor(table["centroids"]))
        tables.append(table)
    write_json(
        out,
        {
            "model_hash": info.model_hash,
            "corpus_hash": captured.metadata["corpus_hash"],
            "origin": captured.metadata["engine"],
            "sigma_hash": file_hash(sigma_path),
            "rotated_hash": file_hash(rotated_path) if "post_rope" in {t["placement"] for t in tables} else None,
            "study": study,
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
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    name: str,
) -> torch.Tensor:
    """Normalised residuals of all calibration contexts and coded layers, float32, one dimension.

    With `angles` the tensors are rotated first, as a codec behind the rotary embedding sees them.

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
        x = rotated(x, *angles) if angles else x
        parts += [codec.residuals(window, Site(i, layer, stream)).flatten() for i, window in enumerate(x)]
    pool = torch.cat(parts)
    if pool.numel() > POOL_LIMIT:
        keep = torch.randperm(pool.numel(), generator=torch.Generator().manual_seed(0))[:POOL_LIMIT]
        pool = pool[keep]
    return pool


def fit_table(recipe: BlockStream, stream: str, pool: torch.Tensor) -> dict:
    """The table of one stream that is best on the pool, and how much better than the Gaussian one it is."""
    gaussian, fitted = quantizer.gaussian_table(recipe.bits), quantizer.fit(pool, recipe.bits)
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

"""Lloyd-Max tables fitted on the exact variable that the quantiser will meet.

The published tables were fitted on another variable than the one that is coded (full rank, no k-means
step) and are worse than the Gaussian ones on the true one. Here the codec itself is run on the sampled
calibration contexts, and its own normalised residuals are pooled: same rank, same k-means, same outlier threshold,
same blocks, same heads. One table per recipe of a stream, because everything in it changes that variable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm import tqdm

from kvlab.calibration.capture import WindowStatistics
from kvlab.calibration.metrics import Angles
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.block import BlockStream
from kvlab.codecs.registry import build
from kvlab.codecs.shared import quantizer
from kvlab.codecs.shared.metric import rotated
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.recipe import digest

POOL_LIMIT = 5_000_000


def residual_pool(
    recipe: BlockStream,
    stream: str,
    observed: WindowStatistics,
    whiteners: dict[int, Whitener],
    layers: Sequence[int],
    angles: Sequence[Angles] | None,
    name: str,
) -> torch.Tensor:
    """Normalised residuals of the sampled contexts in the coded layers, float32, one dimension.

    With `angles`, by layer, the tensors are rotated first, as a codec after the rotary embedding sees them.

    Raises
    ------
    NonFinite
        A captured tensor overflows the codec's half precision.
    """
    gaussian = recipe.model_copy(update={"codebook": "gaussian"})  # the table is what we are looking for
    codec = build(gaussian, StreamCalibration(whiteners=whiteners, centroids=None))
    parts = []
    for layer in tqdm(layers, desc=f"residuals {name}", unit="layer"):
        x = observed.layer(layer, stream)
        x = rotated(x, *angles[layer]) if angles else x
        for number, window in zip(observed.sampled, x, strict=True):
            parts.append(codec.residuals(window, Site(number, layer, stream)).flatten())
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

"""Recipes and tensors for the codec's tests."""

import torch

from kvlab.codecs.base import Site
from kvlab.codecs.block import BlockStream

SITE = Site(window=0, layer=1, stream="k")

DEFAULTS = {
    "bits": 3,
    "variance_ratio": 1.0,
    "block_size": 512,
    "layout": "per_head",
    "n_centres": 16,
    "kmeans_iterations": 8,
    "pca": "randomized",
    "rank_fraction": 0.5,
    "oversample": 8,
    "power_iterations": 2,
    "skeleton": "fp16",
    "outlier_threshold": None,
    "share_basis": False,
    "whiten": False,
    "codebook": "gaussian",
    "seed": 7,
}


def recipe(**changes) -> BlockStream:
    """A recipe near the default one."""
    return BlockStream(**{**DEFAULTS, **changes})


def stream(heads=2, tokens=512, dim=64, seed=0, decay=1.5) -> torch.Tensor:
    """Correlated Gaussian rows [heads, tokens, dim] with a decaying spectrum and a mean of their own."""
    source = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -decay, dim)
    turn = torch.linalg.qr(torch.randn(heads, dim, dim, generator=source)).Q
    rows = (torch.randn(heads, tokens, dim, generator=source) * scale) @ turn
    return rows + torch.randn(heads, 1, dim, generator=source)


def second_moment(heads=2, dim=64, seed=1) -> torch.Tensor:
    """A badly conditioned second moment of queries [heads, dim, dim]."""
    source = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, 4 * dim, dim, generator=source, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(heads, dim, dim, generator=source, dtype=torch.float64)).Q
    queries = (queries * torch.logspace(1, -1, dim, dtype=torch.float64)) @ turn
    return queries.mT @ queries / (4 * dim)


def relative_error(x, decoded) -> float:
    """Squared error over squared deviation from each head's mean."""
    x = x.double()
    return ((decoded - x).square().sum() / (x - x.mean(1, keepdim=True)).square().sum()).item()


def tensors(encoded) -> list[torch.Tensor]:
    """Every stored array."""
    return [array for arrays in (encoded.shared, *encoded.blocks) for array in arrays]


def nbytes(encoded) -> int:
    """Bytes of the stored arrays, without what a stream adds to say what they are."""
    return sum(array.numel() * array.element_size() for array in tensors(encoded))

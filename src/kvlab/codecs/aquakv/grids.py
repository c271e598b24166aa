"""Vector grids of Gaussian numbers: the points that lose the least squared error, for words of two and of four.

HIGGS (arXiv 2411.17525), which AQUA-KV codes with, takes such grids. They were computed once, by `fitted`, since that
takes minutes; `python -m kvlab.codecs.aquakv.grids` does it again and writes the file that `grid` reads.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlab.codecs.shared.apart import apart

FILE = Path(__file__).with_name("grids.safetensors")
INDICES = {2: range(2, 9), 4: range(4, 9)}
"""By numbers of a word, for which bits of an index there is a grid."""
AT_ONCE = 1 << 16  # words whose distances are held
POINTS, ROUNDS, ENOUGH = 1 << 16, 200, 1e-6


@lru_cache(maxsize=1)
@apart
def _stored() -> dict[str, Tensor]:
    return load_file(FILE)


def grid(dim: int, bits: int) -> Tensor:
    """The 2**bits points of a grid, float32 [2**bits, dim]."""
    return _stored()[f"{dim}/{bits}"]


def nearest(words: Tensor, points: Tensor) -> Tensor:
    """Number of the point nearest to each word [n, dim], int64 [n]."""
    half = points.square().sum(1) / 2
    return torch.cat([(part @ points.mT - half).argmax(1) for part in words.split(AT_ONCE)])


def fitted(dim: int, bits: int) -> Tensor:
    """A grid by Lloyd's iteration on evenly spread points (Sobol's) turned Gaussian; ends where nothing is gained."""
    draws = torch.quasirandom.SobolEngine(dim, scramble=True, seed=1).draw(POINTS, dtype=torch.float64)
    x = torch.special.ndtri(draws.clamp(1e-9, 1 - 1e-9)).float()
    points, before = x[: 1 << bits].clone(), float("inf")
    for _ in range(ROUNDS):
        near = nearest(x, points)
        error = float((x - points[near]).square().mean())
        if before - error < ENOUGH * error:
            break
        count = torch.bincount(near, minlength=len(points)).clamp(min=1).float()
        points, before = torch.zeros_like(points).index_add_(0, near, x) / count[:, None], error
    return points


if __name__ == "__main__":
    found = {f"{dim}/{bits}": fitted(dim, bits) for dim, widths in INDICES.items() for bits in widths}
    save_file(found, FILE)

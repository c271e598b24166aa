r"""The rank of K that published byte counts betray: an estimate, because the files record no rank.

A block of `n` vectors of D coordinates kept at rank d costs, by the source of the published codec,

.. math:: 2D + 2Dd + 2K_c d + n\,(10 + \lceil N b / 8 \rceil) + 4\,p\,n\,N, \qquad N = 2^{\lceil \log_2 d \rceil}

bytes: the mean and the basis in half precision, K_c centres, per vector 10 bytes of header and b bits for each of
the N rotated coordinates, and 4 bytes for each outlier, of which a share p of Gaussian coordinates exceed the
threshold T, :math:`p = 2(1 - \Phi(T))`. The number of centres is recorded by later harnesses only; 16 is the
codec's default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from validation.published.reading import file_name
from validation.published.rows import PublishedCell, SigmaSidecar

DEFAULT_CENTRES = 16


@dataclass(frozen=True)
class EstimatedRank:
    """The estimated rank of K in one cell: by window, and what it was computed with."""

    cell: PublishedCell
    ranks: tuple[int, ...]
    bytes_per_block: tuple[float, ...]
    full: int


def block_bytes(d: int, dim: int, block: int, bits: float, centres: int, threshold: float | None) -> float:
    """Bytes of one block at rank `d`; the formula of this module."""
    coordinates = 1 << (d - 1).bit_length()
    share = 0.0 if threshold is None else 2 * (1 - NormalDist().cdf(threshold))
    skeleton = 2 * dim + 2 * dim * d + 2 * centres * d
    return skeleton + block * (10 + math.ceil(coordinates * bits / 8)) + 4 * share * block * coordinates


def ranks(cells: Sequence[PublishedCell], sigmas: Sequence[SigmaSidecar]) -> list[EstimatedRank]:
    """The rank in every K-only cell whose calibration's sidecar, which knows heads and head_dim, is in the folder."""
    found = []
    for cell in cells:
        sidecar = next((one for one in sigmas if matches(cell, one)), None)
        if cell.facts.stream == "k" and sidecar and (made := rank(cell, sidecar)):
            found.append(made)
    return found


def matches(cell: PublishedCell, sidecar: SigmaSidecar) -> bool:
    """Whether the sidecar is the one of the calibration that the cell names, for a model of its depth."""
    calibration = (cell.facts.calibration or "").rsplit(".", 1)[0]
    stem = file_name(sidecar.file).rsplit(".", 1)[0]
    return calibration == stem and cell.facts.n_layers == sidecar.n_layers


def rank(cell: PublishedCell, sidecar: SigmaSidecar) -> EstimatedRank | None:
    """The whole ranks whose bytes come nearest to those of each window; None where a field is missing."""
    facts = cell.facts
    sizes = (facts.block_size, facts.bits_k, facts.boundary_layers, facts.context, facts.eval, facts.n_layers)
    counts = [one.coded_bytes for one in cell.windows]
    if None in (*sizes, *counts, sidecar.kv_heads, sidecar.head_dim) or facts.block_size < 1:
        return None
    rows = (facts.context + facts.eval) * sidecar.kv_heads
    blocks = rows // facts.block_size * (facts.n_layers - len(facts.boundary_layers))
    if blocks <= 0:
        return None
    centres = facts.n_centres_k or DEFAULT_CENTRES
    settings = (sidecar.head_dim, facts.block_size, facts.bits_k, centres, facts.outlier_threshold)
    model = {d: block_bytes(d, *settings) for d in range(1, sidecar.head_dim + 1)}
    means = tuple(one / blocks for one in counts)
    nearest = tuple(min(model, key=lambda d: abs(model[d] - mean)) for mean in means)
    return EstimatedRank(cell, nearest, means, sidecar.head_dim)

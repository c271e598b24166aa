"""Case: a codec that adds Gaussian noise of known covariance, in K's place and through the cells' own tap."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvlab.calibration.load import Calibrated
from kvlab.calibration.sigma import second_moment
from kvlab.codecs.base import Encoded, Place, Site, block_index, checked
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.shared import whitening
from kvlab.codecs.shared.seeding import generator
from kvlab.core.recipe import IDENTITY, Cell, Recipe
from kvlab.engines.base import Part
from kvlab.measure.coding import Coder
from kvlab.stats.bootstrap import Column
from kvlab.stats.slope import linear_range, log_log_slope
from validation.planted.claims import Case, Claim
from validation.planted.ground import Ground, column, measured, window_column

CASE = "noise of known covariance"
RIDGE = 1e-3
SIZE = 0.1  # of the noise, times the rms of a layer's keys
SPREAD = 100.0  # the covariance's condition number
SIGMAS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)  # of white noise, each twice the one before
SEED = 20


class KnownNoise:
    """A codec that adds rows of N(0, A A^T) to K, one A per head.

    Parameters
    ----------
    roots : dict of int to Tensor
        A^T of each head by layer, float64 [heads, head_dim, head_dim].
    """

    per_token: ClassVar[bool] = False

    def __init__(self, roots: dict[int, Tensor]):
        self.roots = roots

    def encode(self, x: Tensor, site: Site) -> Encoded:
        """Add the noise of this site."""
        source = generator("planted", "noise", site.window, site.layer, site.stream)
        white = torch.randn(x.shape, generator=source, dtype=torch.float64)
        values = checked(x, site) + (white @ self.roots[site.layer]).float().to(x.device)
        return Encoded(tuple(x.shape), site.layer, site.stream, shared=(), blocks=((values,),), packed=False)

    def decode(self, encoded: Encoded) -> Tensor:
        """The noised tensor."""
        return encoded.blocks[0][0].clone()

    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`; there is one block only."""
        block_index(encoded, index)
        return (slice(None), slice(None)), self.decode(encoded)


ABOUT = (
    "A codec that adds Gaussian noise of known covariance C to K sits in the cells' tap; the tap's own sums have to"
    " come to tr(ΣC) per token. White noise of a size and of twice that size, where the noise study finds the response"
    " linear, has to cost KL as one to four."
)


class PlantedCoder(Coder):
    """A coder whose codec is planted in the place of its recipe's."""

    def __init__(self, cell: Cell, calibrated: Calibrated, codec: KnownNoise):
        super().__init__(cell, calibrated)
        self._codecs = dict.fromkeys(self._codecs, codec)


def case(ground: Ground) -> Case:
    """The noise's weighted error, and KL's square law."""
    return Case(CASE, ABOUT, [*weighted_errors(ground), *square_law(ground)])


# --------------------------------------------------------------------------------- tr(Sigma C)


def weighted_errors(ground: Ground) -> list[Claim]:
    """Sigma-weighted squared error of each layer per token: the trace of Sigma C, summed over heads."""
    calibrated, roots = calibration(ground)
    planted = {layer: trace(calibrated.whiteners[layer], roots[layer]) for layer in ground.layers}
    errors, signals = tallies(ground, calibrated, KnownNoise(roots))
    found = []
    for layer in ground.layers:
        per_token = window_column(errors[:, layer] / ground.context)
        name = f"layer {layer}: weighted error, tr(ΣC)"
        found.append(Claim(CASE, name, "per token", planted[layer], lambda boot, c=per_token: boot.mean(c)))
    columns = [window_column(part.sum(1)) for part in (errors, signals)]
    relative = sum(planted.values()) * ground.context * len(errors) / signals.sum()
    name = "all layers: weighted error over the weighted signal"
    found.append(Claim(CASE, name, "ratio", relative, lambda boot: boot.ratio(*columns)))
    return found


def calibration(ground: Ground) -> tuple[Calibrated, dict[int, Tensor]]:
    """Sigma_q of the calibration windows, and the noise's roots in units of the keys' rms there."""
    kept: dict[tuple[int, str], list[Tensor]] = {}

    def tap(layer: int, part: Part, x: Tensor) -> None:
        kept.setdefault((layer, part), []).append(x.detach().cpu())

    for ids in ground.calib:
        ground.engine.score(ids, len(ids) - 2, tap)
    whiteners, roots = {}, {}
    for layer in ground.layers:
        q, k = (torch.stack(kept[layer, part]) for part in ("q", "k"))
        whiteners[layer] = whitening.fit(second_moment(q, ground.engine.info.n_kv_heads), RIDGE)
        rms = k.double().square().mean().sqrt().item()
        roots[layer] = SIZE * rms * unit_roots(k.shape[1], k.shape[3], layer)
    names = {"origin": "hf", "corpus_hash": "", "sigma_hash": "", "calibration_hash": ""}
    return Calibrated(whiteners=whiteners, tables={}, **names), roots


def unit_roots(heads: int, dim: int, layer: int) -> Tensor:
    """A^T with A A^T of mean diagonal 1 and condition number `SPREAD`, in random axes, one per head."""
    source = generator("planted", "covariance", layer)
    axes = torch.linalg.qr(torch.randn(heads, dim, dim, generator=source, dtype=torch.float64)).Q
    values = torch.logspace(0, -np.log10(SPREAD), dim, dtype=torch.float64)
    return (values / values.mean()).sqrt()[:, None] * axes.mT


def trace(whitener: whitening.Whitener, roots: Tensor) -> float:
    """tr(Sigma C), summed over heads; Sigma is what the whitener's factor says, C = A A^T."""
    chol = whitener.chol.double()
    return float(torch.einsum("hij,hji->", chol @ chol.mT, roots.mT @ roots))


def tallies(ground: Ground, calibrated: Calibrated, codec: KnownNoise) -> tuple[np.ndarray, np.ndarray]:
    """Weighted squared error and signal of each window and layer [windows, layers], from the coders' tallies."""
    coders = []
    for layer in ground.layers:
        cell = ground.cell("planted noise", IDENTITY, stream="k", layers=(layer,), protocol="snapshot")
        coders.append(PlantedCoder(cell, calibrated, codec))
    sums = []
    for window in range(len(ground.test)):
        run = ground.run(window)
        for coder in coders:
            run.logits(coder.cell, coder)
        sums.append([(coder.tally.error_sq["k"], coder.tally.signal_sq["k"]) for coder in coders])
    for coder in coders:
        coder.refuse_idle()
    per_window = np.diff(np.array(sums), axis=0, prepend=np.zeros((1, len(coders), 2)))
    return per_window[..., 0], per_window[..., 1]


# --------------------------------------------------------------------------------- KL's square law


def square_law(ground: Ground) -> list[Claim]:
    """Twice the noise is four times the KL, and the slope is two, where the response is linear."""
    names = [f"{sigma:g}" for sigma in SIGMAS]
    streams = [NoiseStream(sigma=sigma, seed=SEED) for sigma in SIGMAS]
    coders = {"identity": Coder(ground.cell("identity", IDENTITY), None)}
    coders |= {
        name: Coder(ground.cell(name, Recipe(k=s, v=s), stream="k"), None)
        for name, s in zip(names, streams, strict=True)
    }
    rows = measured(ground, coders, len(ground.test))
    columns = [column(rows, name) for name in names]
    inside = np.flatnonzero(inside_range(columns, column(rows, "identity")))
    pair = columns[inside[1]], columns[inside[0]]
    least = [columns[i] for i in inside[:3]]
    sizes = np.array(SIGMAS)[inside[:3]]
    at = f"K, σ from {SIGMAS[inside[0]]:g}"
    return [
        Claim(CASE, f"{at}: KL at 2σ over KL at σ", "ratio", 4.0, lambda boot: boot.ratio(*pair)),
        Claim(CASE, f"{at}: exponent of KL", "slope", 2.0, lambda boot: log_log_slope(boot, sizes, least)),
    ]


def inside_range(columns: list[Column], floor: Column) -> np.ndarray:
    """Where the response is linear, as the noise study finds it."""
    level = floor.sums.sum() / floor.counts.sum()
    return linear_range(np.array(SIGMAS), np.array([c.sums.sum() / c.counts.sum() for c in columns]), level)

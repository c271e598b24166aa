"""Case: Gaussian sources, whose rate-distortion function and best scalar quantisers are known.

What is planted is computed here a second time, by other means than the codec's own: integrals by quadrature,
roots by bracketing, the spending of bits by a heap.
"""

from __future__ import annotations

import heapq
from functools import cache

import numpy as np
import torch
from scipy.integrate import quad
from scipy.optimize import brentq, root
from scipy.stats import norm
from torch import Tensor

from kvlab.calibration.load import Calibrated
from kvlab.codecs.base import Site
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.codec import vector_bits
from kvlab.codecs.klt.marginal import MAX_WIDTH
from kvlab.codecs.shared import quantizer
from kvlab.codecs.shared.components import Components
from kvlab.codecs.shared.seeding import generator
from kvlab.codecs.shared.sketch import gaussian_sketch
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.recipe import Cell, Recipe
from kvlab.measure.coding import Coder
from kvlab.stats.bootstrap import Column
from validation.limit import theory as limit
from validation.planted.claims import Case, Claim, up_to

CASE = "gaussian source"
MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # mean squared errors, as printed
OF_ITS_TIME = 5e-4  # relative; his tables of 3 and 4 bits are off by .02 % and .04 %, as far as 1960 computed them
WINDOWS, TOKENS, DIM = 64, 512, 16
SAMPLES = 8192  # per window of the scalar source: rare values beyond the table carry much of the error
RATES = (0.5, 1.0, 2.0, 3.0)  # bits per value at which the limit is compared
KLT_BITS = (2.0, 3.0)
DECAY = 0.6  # ratio of neighbouring eigenvalues
QUADRATURE = 1e-8  # relative error of the integrals and roots below
FAR = 12.0  # the Gaussian density is below 1e-31 from here on


ABOUT = (
    "Samples of N(0, 1) go through the codecs' scalar quantisers, and tensors of known covariance through `klt` in a"
    " known metric. Planted are the error of the best quantiser, by quadrature; D(R) of memoryless and of correlated"
    " Gaussian sources, by bracketing the water level; and what the best spending of the bits leaves."
)


def case() -> Case:
    """Everything that is planted about Gaussian sources."""
    claims = [*literature(), *scalar(), *bounds(), *transform()]
    return Case(CASE, ABOUT, claims, path="codecs and limits alone, no engine")


def literature() -> list[Claim]:
    """The quantisers' errors against those that Max (1960, table I) printed."""
    found = []
    for bits, printed in MAX_1960.items():
        mse = quantizer.mse(quantizer.gaussian_table(bits))
        name = f"error at {in_bits(bits)}, as Max printed it"
        found.append(up_to(CASE, name, "σ²", printed, mse, OF_ITS_TIME * printed))
    return found


def scalar() -> list[Claim]:
    """Error on fresh samples, and its distance in bits from D(R) = 2^-2R."""
    found = []
    for bits in MAX_1960:
        column = squared_errors(bits)
        planted = least_distortion(bits)
        found.append(Claim(CASE, f"error at {in_bits(bits)}", "σ²", planted, lambda boot, c=column: boot.mean(c)))

        def loss(means: np.ndarray, bits=bits) -> np.ndarray:
            return bits - limit.rate_at(torch.ones(1), torch.from_numpy(means[..., 0].copy())).numpy()

        excess = bits + np.log2(planted) / 2
        claim = Claim(
            CASE,
            f"bits above the limit at {in_bits(bits)}",
            "bits",
            excess,
            lambda boot, c=column, f=loss: boot.combine([c], f),
        )
        found.append(claim)
    return found


def squared_errors(bits: int) -> Column:
    """Squared errors of the pipeline's quantiser on fresh samples of N(0, 1)."""
    z = torch.randn(WINDOWS, SAMPLES, generator=generator("planted", "scalar", bits), dtype=torch.float64)
    table = quantizer.gaussian_table(bits)
    return grid((z - table[quantizer.quantise(z, table)]).square())


def bounds() -> list[Claim]:
    """Reverse water-filling against a root of the rate."""
    values = eigenvalues()
    found = []
    for bits in RATES:
        planted = distortion_at(values, bits)
        ours = limit.distortion_at(torch.from_numpy(values), bits).item()
        name = f"D(R) of {DIM} components at {in_bits(bits)}"
        found.append(up_to(CASE, name, "σ²", planted, ours, QUADRATURE * planted))
    return found


def transform() -> list[Claim]:
    """`klt` on a Gaussian of known covariance in a known metric: its error, and its bits above the limit."""
    values = eigenvalues()
    found = []
    for rate in KLT_BITS:
        recipe = KltStream(bits=rate, block_size=TOKENS, escape=False)
        spent = vector_bits(recipe, 1, DIM)
        planted = spent_error(values, spent)
        column = coded_errors(recipe)
        name = f"`klt` at {in_bits(rate)}"
        found.append(Claim(CASE, f"{name}: weighted error", "per value", planted, lambda boot, c=column: boot.mean(c)))

        def excess(means: np.ndarray, bits=spent / DIM) -> np.ndarray:
            return bits - limit.rate_at(torch.from_numpy(values), torch.from_numpy(means[..., 0].copy())).numpy()

        claim = Claim(
            CASE,
            f"{name}: bits above the limit",
            "bits",
            spent / DIM - rate_at(values, planted),
            lambda boot, c=column, f=excess: boot.combine([c], f),
        )
        found.append(claim)
    return found


def coded_errors(recipe: KltStream) -> Column:
    """Weighted squared error per value of tensors that went through a `Coder`, as the cells' do."""
    components, whitener, draw = known_source()
    calibrated = Calibrated(
        whiteners={0: whitener},
        tables={},
        origin="hf",
        corpus_hash="",
        sigma_hash="",
        calibration_hash="",
        components={"k": {0: components}},
    )
    cell = Cell(
        study="cells",
        label="planted source",
        engine="hf",
        dtype="float32",
        protocol="snapshot",
        origin="hf",
        stream="k",
        layers=(0,),
        windows=WINDOWS,
        recipe=Recipe(k=recipe, v=IdentityStream()),
    )
    coder, sums = Coder(cell, calibrated), []
    for window in range(WINDOWS):
        white = torch.randn(1, TOKENS, DIM, generator=generator("planted", "klt", window), dtype=torch.float64)
        coder.round_trip((white @ draw).float(), Site(window, 0, "k"))
        sums.append(coder.tally.error_sq["k"])
    coder.refuse_idle()
    errors = np.diff(sums, prepend=0.0) / (TOKENS * DIM)
    return Column.of(np.arange(WINDOWS), np.zeros(WINDOWS, int), errors)


def known_source() -> tuple[Components, Whitener, Tensor]:
    """A Gaussian whose weighted spectrum is `eigenvalues`, in a metric that is not white.

    Returns
    -------
    components : Components
        As `components.fit` would find them from infinitely many tokens.
    whitener : Whitener
        L, with L L^T the metric.
    draw : Tensor
        White rows times this are the source, float64 [DIM, DIM].
    """
    source = generator("planted", "metric")
    axes = torch.linalg.qr(torch.randn(DIM, DIM, generator=source, dtype=torch.float64)).Q
    chol = torch.tril(0.3 * torch.randn(DIM, DIM, generator=source, dtype=torch.float64))
    chol.diagonal().copy_(torch.logspace(-1, 1, DIM, dtype=torch.float64))
    inverse = torch.linalg.solve_triangular(chol, torch.eye(DIM, dtype=torch.float64), upper=False)
    values = torch.from_numpy(eigenvalues())
    draw = values.sqrt()[:, None] * axes.mT @ inverse
    components = Components(
        mean=torch.zeros(1, DIM),
        sink=torch.zeros(1, DIM),
        covariance=(draw.mT @ draw)[None].float(),
        forward=(chol @ axes)[None].float(),
        inverse=(axes.mT @ inverse)[None].float(),
        variance=values[None].float(),
        sketch=gaussian_sketch(DIM)[None].float(),
    )
    return components, Whitener(chol[None].float(), inverse[None].float()), draw


def eigenvalues() -> np.ndarray:
    """The planted spectrum, descending, of mean 1."""
    values = DECAY ** np.arange(DIM)
    return values / values.mean()


def in_bits(count: float) -> str:
    """A number of bits in words."""
    return f"{count:g} bit" if count == 1 else f"{count:g} bits"


def grid(values: Tensor) -> Column:
    """Values [windows, tokens] as a column."""
    windows, tokens = values.shape
    return Column.of(
        np.repeat(np.arange(windows), tokens), np.tile(np.arange(tokens), windows), values.flatten().numpy()
    )


# ------------------------------------------------------------------------------ the truth, by other means


@cache
def least_distortion(bits: int) -> float:
    """Error of the best quantiser of N(0, 1) with 2**bits values: a root of Max's conditions, then quadrature.

    By symmetry the positive half is enough; every value is the mean of its cell, every edge the middle of two values.
    """
    if bits == 0:
        return 1.0
    half = 2 ** (bits - 1)
    start = np.sqrt(3) * norm.ppf(0.5 + (np.arange(half) + 0.5) / (2 * half))
    values = root(lambda y: centroids(y) - y, start, tol=1e-12).x
    edges = cell_edges(values)
    parts = [quad(lambda x, y=y: (x - y) ** 2 * norm.pdf(x), *edges[i : i + 2])[0] for i, y in enumerate(values)]
    return 2 * float(np.sum(parts))


def cell_edges(values: np.ndarray) -> np.ndarray:
    """Edges of the cells of the positive half."""
    return np.concatenate([[0.0], (values[1:] + values[:-1]) / 2, [FAR]])


def centroids(values: np.ndarray) -> np.ndarray:
    """Mean of N(0, 1) in each cell."""
    edges = cell_edges(values)
    return (norm.pdf(edges[:-1]) - norm.pdf(edges[1:])) / (norm.sf(edges[:-1]) - norm.sf(edges[1:]))


def rate_at(values: np.ndarray, distortion: float) -> float:
    """Bits per value at a mean squared error: the water level by bracketing."""
    level = brentq(lambda t: np.minimum(values, t).mean() - distortion, 0, values.max(), xtol=1e-300, rtol=1e-14)
    return float(np.maximum(0, np.log2(values / level) / 2).mean())


def distortion_at(values: np.ndarray, bits: float) -> float:
    """Mean squared error at bits per value: the water level by bracketing its logarithm."""

    def over(log_level: float) -> float:
        return np.maximum(0, (np.log2(values) - log_level) / 2).mean() - bits

    log_level = brentq(over, -200, np.log2(values.max()), rtol=1e-14)
    return float(np.minimum(values, 2**log_level).mean())


def spent_error(values: np.ndarray, total: int) -> float:
    """Mean squared error per value when `total` bits go where they lower it most, one by one."""
    width = [0] * len(values)
    gains = [(-value * (1 - least_distortion(1)), i) for i, value in enumerate(values)]
    heapq.heapify(gains)
    for _ in range(total):
        _, i = heapq.heappop(gains)
        width[i] += 1
        if width[i] < MAX_WIDTH:
            gain = least_distortion(width[i]) - least_distortion(width[i] + 1)
            heapq.heappush(gains, (-values[i] * gain, i))
    return float(np.mean([value * least_distortion(w) for value, w in zip(values, width, strict=True)]))

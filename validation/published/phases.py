"""What the phases of the gap decomposition allow: slopes of noise, sums over layers, ratios over layers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Estimate
from kvlab.stats.slope import log_log_slope
from validation.published.reanalyse import BOOTSTRAP, plain_column, t_interval
from validation.published.rows import LayerErrors, PublishedCell, SettingsGrid, SigmaSidecar, SingleLayers

SATURATION = 1.0  # nats; beyond, the text is as good as unknown


# ------------------------------------------------------------------------------------------- noise


@dataclass(frozen=True)
class Slope:
    """Noise on one engine: between which sizes abs_dlogp grows, and how steeply.

    `slope` is that of log(mean abs_dlogp) against log(sigma) between `low` and `high`, the pair of neighbours below
    saturation; one is linear. None where the files leave no such pair.
    """

    engine: str | None
    file: str
    sigmas: tuple[float, ...]
    low: float | None
    high: float | None
    slope: Estimate | None


def slopes(cells: Sequence[PublishedCell]) -> list[Slope]:
    """One entry per noise file."""
    found = []
    noisy = [cell for cell in cells if cell.role == "noise"]
    for file in dict.fromkeys(cell.file for cell in noisy):
        own = sorted((cell for cell in noisy if cell.file == file), key=lambda cell: cell.sigma)
        usable = [cell for cell in own if responds(cell)]
        slope = steepness(usable)
        low, high = (usable[0].sigma, usable[-1].sigma) if slope else (None, None)
        found.append(Slope(own[0].facts.engine, file, tuple(one.sigma for one in own), low, high, slope))
    return found


def responds(cell: PublishedCell) -> bool:
    """Whether noise of this size moves the text without drowning it."""
    values = [one.abs_dlogp for one in cell.windows]
    if cell.sigma <= 0 or len(values) < 2 or not all(value is not None and value > 0 for value in values):
        return False
    return statistics.fmean(values) < SATURATION


def steepness(cells: Sequence[PublishedCell]) -> Estimate | None:
    """Slope on logarithms of abs_dlogp against the size of the noise; None where the sizes do not give one."""
    if len(cells) < 2 or len({tuple(one.window for one in cell.windows) for cell in cells}) > 1:
        return None
    columns = [plain_column(cell.windows, [one.abs_dlogp for one in cell.windows]) for cell in cells]
    try:
        return log_log_slope(BOOTSTRAP, np.array([cell.sigma for cell in cells]), columns)
    except Fault:  # two equal sizes, or numbers too small for their squares
        return None


def engine_differences(cells: Sequence[PublishedCell]) -> list[tuple[float, PublishedCell, PublishedCell, Estimate]]:
    """At each size of noise, vLLM's delta_nll minus HF's, paired by window."""
    noisy = [cell for cell in cells if cell.role == "noise"]
    found = []
    for a, b in itertools.permutations(noisy, 2):
        alike = a.sigma == b.sigma and a.facts.stream == b.facts.stream and len(a.windows) == len(b.windows) > 1
        if alike and (a.facts.engine, b.facts.engine) == ("hf", "vllm"):
            values = [two.delta_nll - one.delta_nll for one, two in zip(a.windows, b.windows, strict=True)]
            found.append((a.sigma, a, b, t_interval(plain_column(a.windows, values))))
    return sorted(found, key=lambda one: one[0])


# ------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True)
class LayerSums:
    """Sums of the effects of single layers, and what stands against them.

    `scatter` is the standard deviation over the layers outside the boundary, `noise` the standard error that their sum
    would have if that scatter were all noise. `whole` is the cell that codes those layers together.
    """

    layers: SingleLayers
    boundary: tuple[int, ...] | None
    boundary_file: str | None
    boundary_sum: float | None
    other_sum: float | None
    absolute_sum: float | None
    n_other: int
    scatter: float | None
    noise: float | None
    half_width: float | None
    whole: PublishedCell | None
    whole_change: Estimate | None
    interaction: float | None
    top1_lost: float | None


def layer_sums(layers: SingleLayers, cells: Sequence[PublishedCell]) -> LayerSums:
    """Sums inside and outside the boundary set, which is that of a whole-model cell in the same folder."""
    whole = whole_cell(layers, cells)
    given = layers.facts.boundary_layers
    boundary = given if given else whole.facts.boundary_layers if whole else None
    effects = {one.layer: one for one in layers.effects}
    kept = set(boundary) if boundary is not None and set(boundary) <= set(effects) else None
    if kept is None:
        return LayerSums(layers, None, None, None, None, None, 0, *[None] * 7)
    inside = [effects[one].change for one in sorted(kept)]
    outside = [one.change for layer, one in sorted(effects.items()) if layer not in kept]
    scatter = statistics.stdev(outside) if len(outside) > 1 else None
    noise = scatter * math.sqrt(len(outside)) if scatter is not None else None
    whole_change = None
    if whole and len(whole.windows) > 1:
        whole_change = t_interval(plain_column(whole.windows, [one.change for one in whole.windows]))
    agreements = [one.top1 for one in layers.effects if one.top1 is not None]
    return LayerSums(
        layers=layers,
        boundary=tuple(sorted(kept)),
        boundary_file=None if given else whole.file,
        boundary_sum=sum(inside),
        other_sum=sum(outside),
        absolute_sum=sum(map(abs, outside)),
        n_other=len(outside),
        scatter=scatter,
        noise=noise,
        half_width=noise * float(stdtrit(len(outside) - 1, 0.5 + BOOTSTRAP.confidence / 2)) if noise else None,
        whole=whole,
        whole_change=whole_change,
        interaction=whole_change.value - sum(outside) if whole_change else None,
        top1_lost=1 - statistics.fmean(agreements) if agreements else None,
    )


def whole_cell(layers: SingleLayers, cells: Sequence[PublishedCell]) -> PublishedCell | None:
    """The cell that codes all layers outside a boundary with the recipe of the single layers.

    Every recipe field that both record must be equal; of several, the first by file name.
    """
    names = ("engine", "protocol", "bits_k", "bits_v", "block_size", "calibration", "codebook_k", "codebook_v")
    names += ("outlier_threshold", "v_outlier_threshold", "context", "eval", "n_layers", "variance_ratio")

    def alike(cell: PublishedCell) -> bool:
        pairs = [(getattr(cell.facts, name), getattr(layers.facts, name)) for name in names]
        same = all(one == two for one, two in pairs if one is not None and two is not None)
        return same and cell.facts.stream == layers.facts.stream and cell.facts.boundary_layers is not None

    fitting = [cell for cell in cells if cell.role == "codec" and cell.claim == "block codec" and alike(cell)]
    return next((cell for cell in fitting if cell.facts.calibration is not None), next(iter(fitting), None))


# --------------------------------------------------------------------------------- ratios and grids


def layer_ratio(errors: LayerErrors, name: str) -> Estimate | None:
    """Mean over layers of a quantity, with a t interval over layers (not over texts: those are not in the file)."""
    values = errors.values.get(name)
    if not values or len(values) < 2:
        return None
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.5 + BOOTSTRAP.confidence / 2)) * error
    mean = statistics.fmean(values)
    return Estimate(mean, mean - half, mean + half, n, 0, "t")


@dataclass(frozen=True)
class Knob:
    """The variance_ratio at work: two of its values, all other settings paired.

    `better` counts the pairs in which the higher ratio costs less.
    """

    low: float
    high: float
    settings: tuple[tuple[str, object], ...]
    pairs: int
    mean_low: float
    mean_high: float
    better: int
    kl_low: float | None
    kl_high: float | None


def knobs(grid: SettingsGrid) -> list[Knob]:
    """For neighbouring variance ratios, by bits and whitening: means over the other settings, paired."""
    ratios = sorted({one.settings["variance_ratio"] for one in grid.rows})
    split = [name for name in ("bit_width", "q_precond") if any(name in one.settings for one in grid.rows)]
    keys = list(dict.fromkeys(tuple((name, one.settings.get(name)) for name in split) for one in grid.rows))
    found = []
    for (low, high), key in itertools.product(itertools.pairwise(ratios), keys):
        pairs = [pair for pair in paired(grid, low, high) if all(pair[0].settings.get(k) == v for k, v in key)]
        if pairs:
            found.append(knob(low, high, key, pairs))
    return found


def paired(grid: SettingsGrid, low: float, high: float) -> list[tuple]:
    """Rows at two variance ratios that agree in everything else.

    Raises
    ------
    Fault
        When two rows of a grid have the same settings.
    """

    def rest(row) -> tuple:
        return tuple(sorted((k, str(v)) for k, v in row.settings.items() if k != "variance_ratio"))

    def at(ratio: float) -> dict:
        own = [row for row in grid.rows if row.settings["variance_ratio"] == ratio]
        named = {rest(row): row for row in own}
        if len(named) != len(own):
            raise Fault(f"{grid.file} holds two rows with the same settings; which of them counts is not recorded")
        return named

    below, above = at(low), at(high)
    return [(below[key], above[key]) for key in below if key in above]


def knob(low: float, high: float, key: tuple, pairs: Sequence[tuple]) -> Knob:
    """Means over paired rows."""
    kl = [[row.kl for row in side] for side in zip(*pairs, strict=True)]
    known = all(value is not None for side in kl for value in side)
    return Knob(
        low=low,
        high=high,
        settings=key,
        pairs=len(pairs),
        mean_low=statistics.fmean(one.change for one, _ in pairs),
        mean_high=statistics.fmean(two.change for _, two in pairs),
        better=sum(two.change < one.change for one, two in pairs),
        kl_low=statistics.fmean(kl[0]) if known else None,
        kl_high=statistics.fmean(kl[1]) if known else None,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Smallest, median and largest."""
    return min(values), statistics.median(values), max(values)


def sigma_spreads(sigma: SigmaSidecar) -> dict[str, tuple[float, float, float]]:
    """Condition numbers, and the largest off-diagonal entry over the mean diagonal."""
    named = {"condition number": sigma.condition, "largest off-diagonal over mean diagonal": sigma.off_diagonal}
    return {name: spread(values) for name, values in named.items() if values}

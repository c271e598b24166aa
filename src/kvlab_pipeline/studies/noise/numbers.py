"""Errors of known kind in a codec's place: how KL grows with their size, and what that says of dtypes and codecs.

Every KL is net of the identity cell of the noise study. Curves are read where the model responds linearly, which
is where KL is quadratic in the noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.quadratic import QuadraticLaw
from kvlab.stats.rounding import relative_rounding
from kvlab.stats.slope import linear_range, log_log_slope
from kvlab_pipeline.jobs.plan import baseline_runs
from kvlab_pipeline.studies.baselines import identity_of
from kvlab_pipeline.studies.columns import divides, net_kl
from kvlab_pipeline.studies.estimates import sides
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.noise.plan import layer_groups
from kvlab_pipeline.studies.tidy import COUNT, NATS, RATIO, Compared, Estimand, Level, Several, VerdictField

CLOSURE_FACTOR = 1.5  # a prediction this close to what was measured, interval included, is a good one
CLOSES, OPEN, FAILS = "closes", "open", "does not close"

CURVE = {"engine": Level(), "stream": Level(), "group": Level("of layers: all, coded or boundary")}

CURVES = Several(
    CURVE
    | {
        "protocol": Level(),
        "sigma": Level("of the noise, over the root mean square of K or V"),
        "kl": Estimand(NATS, "of Gaussian noise in the codec's place, net of the identity cell's"),
    }
)

# How KL grows with the noise, over the range where a power law holds; null where there is no such range.
SLOPE = Several(
    CURVE
    | {
        "slope": Estimand("exponent"),
        "range": Level("the least and the largest sigma of the range"),
        "points": Estimand(COUNT),
        "coefficient": Estimand(NATS, "c of KL = c sigma squared"),
    }
)

# A dtype's KL, predicted from the noise curves and measured.
CLOSURE = Several(
    {
        "engine": Level(),
        "stream": Level(),
        "against": Level("cast: K, V or both of a float32 engine, rounded; else a run of the engine in that dtype"),
        "dtype": Level(),
        "sigma": Level(),
        "in_range": Level(),
        "predicted": Estimand(NATS),
        "measured": Estimand(NATS),
        "ratio": Estimand(RATIO, "measured over predicted"),
        "factor": Estimand(RATIO, "that the ratio may be away from 1 by, either way"),
        "reading": VerdictField((CLOSES, OPEN, FAILS)),
        "share": Estimand(RATIO, "of a run's KL, what rounding K and V is predicted to cause"),
        "cast_share": Estimand(RATIO, "of a run's KL, what rounding K and V was measured to cause"),
        "compared": Compared(),
    }
)

# The codec's KL, and that of an error of the same size and random direction.
STRUCTURE = Several(
    {
        "engine": Level(),
        "stream": Level(),
        "codec": Estimand(NATS),
        "isotropic": Estimand(NATS),
        "ratio": Estimand(RATIO),
        "compared": Compared(),
    }
)

PARTS = {
    "noise": CURVES,
    "noise_slope": SLOPE,
    "closure": CLOSURE,
    "structure": STRUCTURE,
}


# ------------------------------------------------------------------------------------------ curves


@dataclass(frozen=True, eq=False)
class Curve:
    """KL by the size of the noise on one stream of some layers.

    Parameters
    ----------
    cells : tuple of Measured
        By sigma, ascending.
    columns : tuple of Column
        Their net KL.
    inside : tuple of int
        Which of them lie where the model responds linearly.
    """

    cells: tuple[Measured, ...]
    columns: tuple[Column, ...]
    inside: tuple[int, ...]

    @classmethod
    def of(cls, results: Results, boot: Bootstrap, engine: str, stream: str, layers: tuple[int, ...]) -> Curve | None:
        """The curve of an engine's stream over `layers`; None where it was not measured."""
        found = results.select("noise", "noise", engine=engine, stream=stream, layers=layers)
        if not found:
            return None
        comparable(found, {"sigma"})
        cells = sorted(found, key=lambda measured: sigma_of(measured))
        columns = [net_kl(results, measured) for measured in cells]
        floor = boot.mean(identity_of(results, cells[0]).column("kl", cells[0].cell.windows)).value
        # a curve is read on logarithms, and in resamples: a point that is not positive in every window is no use
        heights = [boot.mean(column).value if (column.means > 0).all() else 0.0 for column in columns]
        inside = np.flatnonzero(linear_range(np.array([sigma_of(m) for m in cells]), heights, floor))
        return cls(tuple(cells), tuple(columns), tuple(inside.tolist()))

    @property
    def sigmas(self) -> np.ndarray:
        """Noise over the rms of the stream, float64 [points]."""
        return np.array([sigma_of(measured) for measured in self.cells])

    def law(self) -> QuadraticLaw | None:
        """The quadratic law of the linear range; None where fewer than two points lie in it."""
        if len(self.inside) < 2:
            return None
        return QuadraticLaw.of(self.sigmas[list(self.inside)], [self.columns[i] for i in self.inside])

    def slope(self, boot: Bootstrap) -> Estimate | None:
        """Exponent of KL against sigma over the linear range; None where fewer than two points lie in it."""
        if len(self.inside) < 2:
            return None
        return log_log_slope(boot, self.sigmas[list(self.inside)], [self.columns[i] for i in self.inside])


def sigma_of(measured: Measured) -> float:
    """The noise of a noise cell, times the rms of K or V."""
    return measured.cell.recipe.k.sigma


def curves(params: Params, results: Results, boot: Bootstrap) -> list[tuple[dict, Curve]]:
    """Every curve that was measured, with its engine, stream and layer group."""
    groups, found = layer_groups(params), []
    for engine, stream, group in product(params.noise.engines, params.noise.streams, params.noise.groups):
        curve = Curve.of(results, boot, engine, stream, groups[group])
        if curve:
            found.append(({"engine": engine, "stream": stream, "group": group}, curve))
    return found


def noise_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """Net KL of each size of noise, by engine, stream and layer group.

    A group that no layer is in has no entries; two groups of the same layers have the same ones.
    """
    return [
        place | {"protocol": params.noise.protocol, "sigma": float(sigma), "kl": boot.divergence(column).to_json()}
        for place, curve in curves(params, results, boot)
        for sigma, column in zip(curve.sigmas, curve.columns, strict=True)
    ]


def noise_slope_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    r"""Exponent and coefficient of each curve over the range where a power law holds (`stats.slope.linear_range`).

    `coefficient` is c of :math:`KL = c\,\sigma^2` (`stats.quadratic`). All are None where fewer than two points
    lie in the range.
    """
    entries = []
    for place, curve in curves(params, results, boot):
        slope, law = curve.slope(boot), curve.law()
        ends = [float(curve.sigmas[curve.inside[end]]) for end in (0, -1)] if law else None
        fitted = {
            "slope": slope and slope.to_json(),
            "range": ends,
            "points": len(curve.inside),
            "coefficient": law and law.coefficient(boot).to_json(),
        }
        entries.append(place | fitted)
    return entries


# ----------------------------------------------------------------------------------------- closure


@dataclass(frozen=True, eq=False)
class Prediction:
    r"""KL that the curves over all layers predict for a rounding: :math:`\sigma^2 \sum c`, over K, V or both.

    K and V are rounded independently, so their errors' costs add where KL is quadratic.
    """

    sigma: float
    curves: tuple[Curve, ...]

    @property
    def columns(self) -> list[Column]:
        """The columns of every curve's linear range."""
        return [curve.columns[i] for curve in self.curves for i in curve.inside]

    @property
    def cells(self) -> list[Measured]:
        """The cells of `columns`."""
        return [curve.cells[i] for curve in self.curves for i in curve.inside]

    @property
    def inside(self) -> bool:
        """Whether sigma lies within the linear range of every curve; if not, the law is stretched."""
        return all(c.sigmas[c.inside[0]] <= self.sigma <= c.sigmas[c.inside[-1]] for c in self.curves)

    def kl(self, means: np.ndarray) -> np.ndarray:
        """The predicted KL for means [..., columns]; float64 [...]."""
        total, start = 0.0, 0
        for curve in self.curves:
            stop = start + len(curve.inside)
            total = total + curve.law().coefficient_of(means[..., start:stop])
            start = stop
        return self.sigma**2 * total

    def ratio(self, boot: Bootstrap, measured: Column) -> Estimate:
        """Measured over predicted KL, paired by window."""
        return boot.combine([*self.columns, measured], lambda m: m[..., -1] / self.kl(m[..., :-1]))

    def share(self, boot: Bootstrap, measured: Column) -> Estimate:
        """Predicted over measured KL, paired by window."""
        return boot.combine([*self.columns, measured], lambda m: self.kl(m[..., :-1]) / m[..., -1])


def closure_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """The closure test: a dtype's KL predicted from the noise curve against the measured one.

    Two kinds of entries, told apart by `against`:

    - ``cast``: K, V or both of a float32 engine, rounded to the dtype where the noise was added. `ratio` is
      measured over predicted; `reading` says whether it closes (`reading`). `share` is None.
    - a baseline run: the engine run in that dtype, every tensor of it, against the float32 truth. `share` is the
      part of its KL that rounding K and V of the context is predicted to cause, `cast_share` the part that doing
      so was measured to cause; None where the run's KL cannot be told from zero. `ratio` and `reading` are None: nobody
      says that the rest of the engine is exact.
    """
    entries = []
    for place, prediction, cast in casts(params, results, boot):
        measured = net_kl(results, cast)
        ratio = prediction.ratio(boot, measured)
        entry = {
            "against": "cast",
            "dtype": cast.cell.recipe.k.dtype,
            "sigma": prediction.sigma,
            "in_range": prediction.inside,
            "predicted": boot.combine(prediction.columns, prediction.kl).to_json(),
            "measured": boot.divergence(measured).to_json(),
            "ratio": ratio.to_json(),
            "factor": CLOSURE_FACTOR,
            "reading": reading(ratio),
            "share": None,
            "cast_share": None,
            "compared": sides(cast, prediction.cells),
        }
        entries += [place | entry]
        entries += [place | entry | run for run in runs(params, results, boot, prediction, cast)]
    return entries


def casts(params: Params, results: Results, boot: Bootstrap) -> list[tuple[dict, Prediction, Measured]]:
    """The cells of a dtype's rounding that the curves over all layers can predict, with their predictions."""
    everything, found = layer_groups(params)["all"], []
    for cast in results.select("noise", "cast", layers=everything):
        engine, stream = cast.cell.engine, cast.cell.stream
        sources = [Curve.of(results, boot, engine, which, everything) for which in stream]
        if all(curve and curve.law() for curve in sources):
            comparable([cast, *(curve.cells[0] for curve in sources)], {"recipe", "stream"})
            prediction = Prediction(relative_rounding(cast.cell.recipe.k.dtype), tuple(sources))
            found.append(({"engine": engine, "stream": stream}, prediction, cast))
    return found


def runs(params: Params, results: Results, boot: Bootstrap, prediction: Prediction, cast: Measured) -> list[dict]:
    """The baseline runs of an engine in the dtype of a rounding of both K and V, over the windows of the noise.

    None over a finished cache: what an engine rounds goes up through its layers.
    """
    cell, found = cast.cell, []
    if cell.stream != "kv" or cell.protocol != "in_forward":
        return found
    for run, (engine, dtype, _) in baseline_runs(params).items():
        if (engine, dtype) != (cell.engine, cell.recipe.k.dtype):
            continue
        measured = results.run_column(run, "kl", windows=cell.windows)
        entry = {"against": run, "measured": boot.divergence(measured).to_json(), "ratio": None, "reading": None}
        entry |= {"compared": None}
        shares = {}
        if divides(boot, measured):
            shares["share"] = prediction.share(boot, measured).to_json()
            shares["cast_share"] = boot.ratio(net_kl(results, cast), measured).to_json()
        found.append(entry | shares)
    return found


def reading(ratio: Estimate) -> str:
    """What a ratio of measured to predicted KL says.

    It ``closes`` when the whole interval lies within a factor of 1.5, and ``does not close`` when all of it lies
    outside; an interval that reaches over an end of that is ``open``.
    """
    least, most = 1 / CLOSURE_FACTOR, CLOSURE_FACTOR
    if least <= ratio.low and ratio.high <= most:
        return CLOSES
    return FAILS if ratio.low > most or ratio.high < least else OPEN


# --------------------------------------------------------------------------------------- structure


def structure_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """The studied codec against its own error turned in a random direction, token by token.

    `ratio` is the codec's KL over the control's: 1 when only the size of the error matters, None where the
    control's KL cannot be told from zero (`net.divides`).
    """
    entries = []
    for codec, control in controls(results):
        columns = [net_kl(results, measured) for measured in (codec, control)]
        ratio = boot.ratio(*columns) if divides(boot, columns[1]) else None
        entry = {
            "engine": codec.cell.engine,
            "stream": codec.cell.stream,
            "codec": boot.mean(columns[0]).to_json(),
            "isotropic": boot.mean(columns[1]).to_json(),
            "ratio": ratio and ratio.to_json(),
            "compared": sides(codec, control),
        }
        entries.append(entry)
    return entries


def controls(results: Results) -> list[tuple[Measured, Measured]]:
    """Every cell of the codec with its control."""
    found = []
    for codec in results.select("noise", "codec"):
        same = {name: getattr(codec.cell, name) for name in ("engine", "stream", "layers")}
        for control in results.select("noise", "isotropic", **same):
            comparable([codec, control], {"recipe"})
            found.append((codec, control))
    return found

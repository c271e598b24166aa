"""Mitigations with planted KL and bytes, as `gather` would hand them over, and the choice made from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell
from kvlab.core.records import TOKENS, CellRecord, Coding
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.mitigations import plan
from kvlab_pipeline.studies.mitigations.plan import ChoiceRecord, LayerChoice, Step
from pipeline.report.planted_identity import SIGMAS, provenance
from pipeline.report.shipped import shipped

WINDOWS, CONTEXT, EVAL = 16, 64, 17
VALUES = 10**6
ENGINES, PROTOCOLS = ("hf", "vllm"), ("in_forward", "snapshot")
FLOOR = 1e-6
CHOICE = LayerChoice(greedy=(0, 2, 3), extended=(0, 3, 5), hot=(3,), klt_boundary=(0,), klt_hot=(4,), moved=(2, 3))


def on_curve(bits: float) -> float:
    """KL of uniform spending: a straight line in its logarithm."""
    return float(0.04 * np.exp(-(bits - 7)))


@dataclass(frozen=True)
class Planted:
    """Bits per value and KL of arms; `gain` multiplies what uniform spending would have.

    Each cell's tokens scatter by `jitter` on their own. The mean of a cell is the planted one; unless it is
    `exact`, only in expectation.
    """

    bits: dict[str, float] = field(
        default_factory=lambda: {
            "uniform 3/2": 7.4,
            "uniform 4/3": 7.8,
            "uniform 6/4": 8.2,
            "uniform 8/6": 9.0,
            "uniform 8/8": 9.2,
            "moved": 7.4,
            "greedy": 8.9,
            "extended": 9.5,
            "hot": 7.5,
            "klt uniform": 4.0,
            "klt boundary": 4.0,
            "klt hot": 4.0,
        }
    )
    gain: dict[str, float] = field(default_factory=dict)
    jitter: float = 0.05
    exact: bool = True

    def kl(self, arm: str) -> float:
        """Planted mean KL."""
        return self.gain.get(arm, 1.0) * on_curve(self.bits[arm])


def planted_params(**changes) -> Params:
    """The embedded model's parameters with few windows."""
    small = {"windows": {"context": CONTEXT, "eval": EVAL, "test": WINDOWS}, "mitigations": {"windows": WINDOWS}}
    short = {name: {"windows": 2} for name in ("noise", "layers", "ladder")}
    return shipped(small | short, changes)


def planted_choice(params: Params, choice: LayerChoice = CHOICE, saved: float = 0.4, **changes) -> ChoiceRecord:
    """A record whose searches save `saved` of the KL that the studied recipe or uniform `klt` has."""
    n = params.model.n_layers
    configured = params.codec.boundary_layers
    searches = {}
    for name, layers in choice.model_dump().items():
        start = configured if name == "extended" else ()
        path = [start, *(tuple(sorted({*start, *layers[: i + 1]})) for i in range(len(layers)))]
        path = list(dict.fromkeys([*path[:-1], tuple(layers)]))
        kls = np.linspace(0.05, 0.05 * (1 - saved), len(path)) if len(path) > 1 else [0.05]
        searches[name] = tuple(
            Step(layers=one, kl=float(kl), bits_per_value=3 + 13 * len(one) / n)
            for one, kl in zip(path, kls, strict=True)
        )
    values = {
        "provenance": provenance(calibration={"hf": SIGMAS["hf"]}),
        "engine": params.calibration.origin,
        "dtype": params.gap.dtype,
        "protocol": "snapshot",
        "windows": params.windows.calib,
        "budget": params.mitigations.budget,
        "search_id": plan.search_id(params),
        "choice": choice,
        "searches": searches,
    }
    return ChoiceRecord(**values | changes)


def planted_results(params: Params, planted: Planted, choice: LayerChoice = CHOICE, **changes) -> Results:
    """Every arm and the identity cell on every engine and protocol."""
    shared = np.random.default_rng(0)
    weight = np.exp(0.3 * shared.standard_normal((WINDOWS, 1))) * shared.gamma(2.0, 0.5, (WINDOWS, EVAL - 1))
    cells, windows = {}, params.mitigations.windows
    for engine in params.engines:
        for protocol in params.mitigations.protocols:
            identity = plan.Mitigation("identity", tuple(range(params.model.n_layers)), IDENTITY)
            for arm in (identity, *plan.arms(params, choice)):
                cell = plan.cell_of(arm, params, engine, protocol, windows)
                bits, kl = (16.0, FLOOR) if arm is identity else (planted.bits[arm.name], planted.kl(arm.name))
                if cell.cell_id not in cells:  # two arms may be one cell: it is what the first one is
                    cells[cell.cell_id] = measured(cell, kl, bits, weight, planted)
    return Results(tuple(cells.values()), {}, {}, provenance(**changes))


def measured(cell: Cell, mean_kl: float, bits: float, weight: np.ndarray, planted: Planted) -> Measured:
    """One cell; windows and tokens weigh alike in all of them, and jitter on their own."""
    own = np.random.default_rng(int(cell.cell_id[:8], 16))
    kl = weight * np.exp(planted.jitter * own.standard_normal(weight.shape))
    kl *= mean_kl / (kl.mean() if planted.exact else weight.mean() * np.exp(planted.jitter**2 / 2))
    window, position = np.meshgrid(np.arange(WINDOWS), np.arange(CONTEXT + 1, CONTEXT + EVAL), indexing="ij")
    zeros = np.zeros(kl.size)
    columns = {name: zeros for name in TOKENS if name != "cell_id"}
    columns |= {"window": window.ravel(), "position": position.ravel(), "kl": kl.ravel(), "nll_alt": 0.8 * kl.ravel()}
    table = pl.DataFrame(columns).with_columns(cell_id=pl.lit(cell.cell_id)).select(list(TOKENS)).cast(dict(TOKENS))
    coding = Coding(
        fires=1,
        expected_fires=1,
        values=VALUES,
        coded_bytes=round(VALUES * bits / 8),
        raw_bytes=0,
        d_eff={},
        outlier_rate={},
        whitened_error={},
    )
    record = CellRecord(cell_id=cell.cell_id, recipe_id=cell.recipe_id, cell=cell, coding=coding, canary_kl=0.1)
    return Measured(record, provenance(), CONTEXT, EVAL, table)

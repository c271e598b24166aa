"""Case: an engine whose alternative pass is off by planted amounts, and the factorial that has to find them.

The shim wraps an engine. A pass with a codec's tap comes back with one logit of every row shifted so that KL to the
clean pass is exactly the row's planted value; any other pass comes back untouched. Windows and rows scatter
around each corner's mean, which is a sum of planted parts and one planted interaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from kvlab.base.recipe import Cell, NoiseStream, Placement, Recipe
from kvlab.engines.base import ContextCache, Engine, Storage, Tap
from kvlab.lab.coding import Coder, InForward, Snapshot
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.shapley import corner_index
from kvlab.studies.factors.numbers import decompose
from validation.planted.claims import ROUNDING, Case, Claim, up_to
from validation.planted.coverage import Distribution, Law
from validation.planted.ground import Ground, column, measured

CASE = "planted logit shift"
UNIT = "nats per token"
BASE = 1e-3  # KL of the corner with every factor low
PARTS = {"engine": 4e-4, "protocol": 6e-4, "dtype": 5e-4, "variance_ratio": 2e-3}
PAIR, TOGETHER = ("protocol", "variance_ratio"), 8e-4  # what two factors do beyond the sum of their parts
LEVELS = {
    "engine": ("hf", "vllm"),
    "protocol": ("snapshot", "in_forward"),
    "dtype": ("float32", "bfloat16"),
    "variance_ratio": (1.0, 0.95),
}
SCATTER = Distribution("shim", "nothing that was measured", Law("gamma", 40.0), Law("lognormal", 0.6))
SEED = 21
HALVINGS = 80
ABOUT = (
    "An engine's coded passes come back with one logit of every row raised until KL has the row's planted value. Over"
    " a full factorial the mean of each corner is a sum of planted parts and one planted interaction; windows and"
    " rows scatter around it, and the report's decomposition has to find parts and interactions."
)


class PlantedShift(Engine):
    """An engine whose coded passes are off by planted amounts.

    Parameters
    ----------
    inner : Engine
        Whose clean logits they are.
    targets : dict of str to float64 array [windows, rows]
        KL to the clean pass, by the id of the cell whose coder is in the tap.
    """

    name = "hf"

    def __init__(self, inner: Engine, targets: dict[str, np.ndarray]):
        super().__init__(inner.info, inner.dtype)
        self.attention, self.inner, self.targets = inner.attention, inner, targets

    @property
    def device(self) -> str:
        """The inner engine's."""
        return self.inner.device

    @property
    def storage(self) -> Storage:
        """The inner engine's."""
        return self.inner.storage

    def score(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> Tensor:
        """See `Engine.score`; shifted where a codec's tap is in place."""
        logits = self.inner.score(ids, first, tap, placement)
        return self._planted(logits, tap) if isinstance(tap, InForward) else logits

    def score_over(self, ids: Sequence[int], cache: ContextCache, placement: Placement = "pre_rope") -> Tensor:
        """See `Engine.score_over`; shifted where the cache was coded."""
        logits = self.inner.score_over(ids, cache, placement)
        return self._planted(logits, cache) if isinstance(cache, Snapshot) else logits

    def _planted(self, logits: Tensor, coded: InForward | Snapshot) -> Tensor:
        return shifted(logits, self.targets[coded.coder.cell.cell_id][coded.window])


def shifted(logits: Tensor, kl: np.ndarray) -> Tensor:
    """Logits, float64, with one of each row raised so that KL from the row as it was is as given.

    Raising a logit of probability p by s makes KL = log(1 - p + p e^s) - s p, which grows with s. The logit is that
    whose probability is nearest to a half, and s is found by bisection.

    Parameters
    ----------
    logits : Tensor [rows, vocabulary]
    kl : float64 array [rows]
        Positive, nats.
    """
    logits = logits.double()
    p, token = closest_to_half(logits.softmax(-1))
    target = torch.from_numpy(kl).to(p)
    low, high = torch.zeros_like(p), torch.ones_like(p)
    while (kl_of_shift(p, high) < target).any():
        high = 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        short = kl_of_shift(p, middle) < target
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return logits.scatter_add(1, token[:, None], ((low + high) / 2)[:, None])


def closest_to_half(p: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's probability nearest to a half, and its token."""
    token = (p - 0.5).abs().argmin(-1)
    return p.gather(1, token[:, None])[:, 0], token


def kl_of_shift(p: Tensor, s: Tensor) -> Tensor:
    """KL between a distribution and the same with the logit of probability `p` raised by `s`."""
    return torch.log1p(p * torch.expm1(s)) - s * p


# ------------------------------------------------------------------------------------ the factorial


def corners() -> list[dict]:
    """Levels of each corner, by corner index (`stats.shapley`)."""
    found = [dict(zip(LEVELS, choice, strict=True)) for choice in product(*LEVELS.values())]
    return sorted(found, key=lambda corner: corner_index([corner[name] != LEVELS[name][0] for name in LEVELS]))


def planted_mean(corner: dict) -> float:
    """KL that a corner scatters around."""
    high = [name for name in LEVELS if corner[name] != LEVELS[name][0]]
    return BASE + sum(PARTS[name] for name in high) + (TOGETHER if set(PAIR) <= set(high) else 0.0)


def case(ground: Ground) -> Case:
    """Every row's KL, and gap, parts and interactions of the factorial."""
    chosen = corners()
    cells = [corner_cell(ground, corner) for corner in chosen]
    rows = len(ground.test[0]) - 1 - ground.context
    means = np.array([planted_mean(corner) for corner in chosen])[:, None, None]
    source = np.random.default_rng(SEED)
    planted = means * SCATTER.draw(source, len(ground.test), len(cells), rows)
    targets = {cell.cell_id: kl for cell, kl in zip(cells, planted, strict=True)}
    coders = {cell.cell_id: Coder(cell, None) for cell in cells}
    table = measured(ground, coders, len(ground.test), PlantedShift(ground.engine, targets))
    columns = [column(table, cell.cell_id) for cell in cells]
    return Case(CASE, ABOUT, [worst_row(planted, table["kl"].to_numpy(), columns[0]), *shares(columns, chosen)])


def corner_cell(ground: Ground, corner: dict) -> Cell:
    """A cell that stands for a corner; its codec adds noise of size zero, whose seed is the corner's ratio."""
    nothing = NoiseStream(sigma=0.0, seed=round(100 * corner["variance_ratio"]))
    settings = {name: corner[name] for name in ("engine", "protocol", "dtype")}
    return ground.cell("planted corner", Recipe(k=nothing, v=nothing), **settings)


def worst_row(planted: np.ndarray, found: np.ndarray, like: Column) -> Claim:
    """The row whose KL is furthest off; the table runs over windows, then corners, then rows."""
    expected = planted.transpose(1, 0, 2).ravel()
    worst = float(np.abs(found / expected - 1).max())
    name = "the row that is furthest off"
    return up_to(CASE, name, "relative", 0.0, worst, ROUNDING, len(like.windows), len(expected))


def shares(columns: list[Column], chosen: list[dict]) -> list[Claim]:
    """Gap, Shapley parts and interactions, as the report's decomposition finds them."""
    factors = list(LEVELS)

    @cache
    def found(boot: Bootstrap) -> dict:
        return decompose(boot, columns, factors, chosen)

    def of(pick: Callable[[dict], dict]) -> Callable[[Bootstrap], Estimate]:
        return lambda boot: Estimate(**pick(found(boot)))

    gap = planted_mean(chosen[-1]) - planted_mean(chosen[0])
    claims = [Claim(CASE, "gap", UNIT, gap, of(lambda d: d["gap"]))]
    for i, name in enumerate(factors):
        part = PARTS[name] + (TOGETHER / 2 if name in PAIR else 0.0)
        claims.append(Claim(CASE, f"part of `{name}`", UNIT, part, of(lambda d, i=i: d["parts"][i]["share"])))
    some = found(Bootstrap(200, 0.95, 0))
    for i, entry in enumerate(some["interactions"]):
        effect = TOGETHER if set(entry["factors"]) == set(PAIR) else 0.0
        name = " with ".join(f"`{factor}`" for factor in entry["factors"])
        claims.append(Claim(CASE, f"{name}", UNIT, effect, of(lambda d, i=i: d["interactions"][i]["effect"])))
    total = sum(part["share"]["value"] for part in some["parts"]) - some["gap"]["value"]
    claims.append(up_to(CASE, "sum of the parts less the gap", UNIT, 0.0, total, ROUNDING * gap))
    return claims

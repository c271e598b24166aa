"""From the numbers of every query to means by head, and to intervals over windows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvlab.core.errors import NonFinite
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab_pipeline.studies.bitplanes.planes import PlanesVariant
from kvlab_pipeline.studies.bitplanes.record import ArmQuantity, ArmRecord, Basis, Difference
from kvlab_pipeline.studies.kvstore_params import BitplanesStudy

DIGITS = 6  # of means that have no interval
COMPARED = 0.1  # the budget, or the nearest to it, at which arms are held against each other


class Sums:
    """Numbers of all queries as they come, window by window and layer by layer.

    Parameters
    ----------
    arms : int
    """

    def __init__(self, arms: int):
        self.rows: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.shares: list[list[float]] = [[] for _ in range(arms)]

    def add(self, window: int, layer: int, found: tuple[Tensor, Tensor, Tensor]) -> None:
        """What `measuring.at` returns for one position."""
        self.rows.setdefault((window, layer), []).append(found)

    def saturation(self, shares: Sequence[float | None]) -> None:
        """Share of each arm's codes at either end of its table, over one layer of one window."""
        for kept, share in zip(self.shares, shares, strict=True):
            kept += [] if share is None else [share]

    def stacked(self, part: int) -> np.ndarray:
        """One part of what was added, float64 [windows, layers, positions, ...]."""
        windows = 1 + max(window for window, _ in self.rows)
        layers = 1 + max(layer for _, layer in self.rows)
        every = [[[row[part] for row in self.rows[w, layer]] for layer in range(layers)] for w in range(windows)]
        stacked = torch.stack([torch.stack([torch.stack(one) for one in window]) for window in every]).numpy()
        if not np.isfinite(stacked).all():
            raise NonFinite("attention or a ranking of its keys holds NaN or infinity", code="non-finite.ranking")
        return stacked


class Means:
    """Intervals over windows of numbers [windows, layers, positions, q_heads, columns], all in one go."""

    def __init__(self, values: np.ndarray, bootstrap: Bootstrap):
        self.values = values
        windows = values.shape[0]
        flat = values.reshape(windows, -1, values.shape[-1])
        window, place = (index.ravel() for index in np.indices(flat.shape[:2]))
        self.columns = [Column.of(window, place, flat[..., i].ravel()) for i in range(flat.shape[-1])]
        self.bootstrap = bootstrap
        self.overall = bootstrap.combine_many(self.columns, lambda means: means)

    def measured(self, column: int, lowest: float = 0.0) -> ArmQuantity:
        """One column: its interval, and its mean in every layer and head."""
        heads = self.values[..., column].mean((0, 2)).round(DIGITS)
        return ArmQuantity(overall=self.overall[column].within(lowest, 1.0), heads=heads.tolist())

    def difference(self, a: int, b: int) -> Estimate:
        """Column a minus column b, paired."""
        return self.bootstrap.difference(self.columns[a], self.columns[b])


def summary(
    sums: Sums,
    asked: Sequence[tuple[PlanesVariant, Basis, bool]],
    settings: BitplanesStudy,
    head_dim: int,
    bootstrap: Bootstrap,
) -> dict:
    """The fields of `BitplanesRecord` that are measured."""
    by_arm = np.moveaxis(sums.stacked(0), 3, 4)  # [windows, layers, positions, q_heads, arms, numbers]
    numbers = by_arm.shape[-1]
    means = Means(by_arm.reshape(*by_arm.shape[:4], -1), bootstrap)
    best = Means(sums.stacked(1), bootstrap)
    own = sums.stacked(2)
    records = [arm_record(means, i, numbers, one, settings, head_dim, sums.shares[i]) for i, one in enumerate(asked)]
    return {
        "arms": [record for record, one in zip(records, asked, strict=True) if not one[2]],
        "controls": [record for record, one in zip(records, asked, strict=True) if one[2]],
        "ceiling": [best.measured(i) for i in range(len(settings.kept))],
        "differences": differences(means, numbers, asked, settings),
        "entropy": float(own[..., 0].mean()),
        "largest": float(own[..., 1].mean()),
    }


def arm_record(
    means: Means,
    number: int,
    numbers: int,
    asked: tuple[PlanesVariant, Basis, bool],
    settings: BitplanesStudy,
    head_dim: int,
    shares: list[float],
) -> ArmRecord:
    """One arm; its columns lie after one another in the order of `measuring.at`."""
    arm, basis, _ = asked
    first, budgets = number * numbers, len(settings.kept)
    token, chunk, forced = (
        tuple(means.measured(first + 1 + part * budgets + i) for i in range(budgets)) for part in range(3)
    )
    return ArmRecord(
        name=arm.name,
        basis=basis,
        group=arm.group,
        width=arm.width(head_dim),
        bits_per_key=arm.bits_per_key(head_dim),
        saturated=float(np.mean(shares)) if shares else None,
        spearman=means.measured(first, lowest=-1.0),
        token=token,
        chunk=chunk,
        forced=forced,
        needed=means.measured(first + numbers - 1),
    )


def differences(
    means: Means, numbers: int, asked: Sequence[tuple[PlanesVariant, Basis, bool]], settings: BitplanesStudy
) -> list[Difference]:
    """What norms, further bits, the size of a group and the rotation change, at one budget."""
    place = {(arm.name, arm.group, basis): i for i, (arm, basis, _) in enumerate(asked)}
    at = min(range(len(settings.kept)), key=lambda i: abs(settings.kept[i] - COMPARED))
    columns = {"spearman": 0, "token": 1 + at, "chunk": 1 + len(settings.kept) + at}
    found = []
    for one, other in compared(settings.groups):
        a, b = (asked[place[key]] for key in (one, other))
        for what, column in columns.items():
            estimate = means.difference(*(place[key] * numbers + column for key in (one, other)))
            found.append(
                Difference(
                    what=what,
                    budget=None if what == "spearman" else settings.kept[at],
                    a=label(a[0]),
                    b=label(b[0]),
                    basis=a[1],
                    other_basis=b[1],
                    difference=estimate,
                )
            )
    return found


def compared(groups: tuple[int, ...]) -> list[tuple[tuple, tuple]]:
    """Pairs of arms, each by its name, group and basis."""
    least, most = min(groups), max(groups)
    grouped = ("sign + norm", "top 2 bits", "3 bits")
    pairs = [((name, least, "rotated"), (name, most, "rotated")) for name in grouped if least != most]
    pairs += [(("sign + norm", least, "rotated"), ("sign", None, "rotated"))]
    pairs += [((a, least, "rotated"), (b, least, "rotated")) for b, a in pairwise(grouped)]
    pairs += [(("full", None, "rotated"), ("3 bits", least, "rotated"))]
    return [*pairs, (("sign", None, "rotated"), ("sign", None, "raw"))]


def label(arm: PlanesVariant) -> str:
    """An arm's name, with its group."""
    return arm.name if arm.group is None else f"{arm.name}, {arm.group}"

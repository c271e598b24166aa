"""What was measured: one cell with its token rows, all cells of a model, and columns of them by window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvlab.core.errors import MissingResult
from kvlab.core.recipe import CONTROLS, IDENTITY, Cell
from kvlab.core.records import BaselineRecord, CellRecord, Provenance
from kvlab.stats.bootstrap import Column

# What is read of a token table, by its columns as arrays; polars takes a millisecond for such a step, and a report
# makes ten thousand of them.
QUANTITIES: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = {
    "kl": lambda t: t["kl"],
    "delta_nll": lambda t: t["nll_alt"] - t["nll_ref"],
    "delta_nll_squared": lambda t: (t["nll_alt"] - t["nll_ref"]) ** 2,
    "top1_agreement": lambda t: t["top1_ref"] == t["top1_alt"],
    "flips_to_wrong": lambda t: (t["top1_ref"] != t["top1_alt"]) & (t["top1_ref"] == t["label"]),
    "flips_to_right": lambda t: (t["top1_ref"] != t["top1_alt"]) & (t["top1_alt"] == t["label"]),
}


@dataclass(frozen=True, eq=False)
class Measured:
    """One cell with its token rows, sorted by window and position.

    `documents` says which document each window of its text is of; None where that is not known.
    """

    record: CellRecord
    provenance: Provenance
    context: int
    eval: int
    tokens: pl.DataFrame
    documents: tuple[int, ...] | None = None

    @property
    def cell(self) -> Cell:
        """Which measurement this is."""
        return self.record.cell

    @property
    def role(self) -> str:
        """``rerun`` (no hook at all), ``identity``, ``noise``, ``cast``, ``isotropic`` or ``codec``."""
        if self.cell.recipe == IDENTITY:
            return "identity" if self.cell.layers else "rerun"
        name = self.cell.recipe.k.codec
        return name if name in CONTROLS else "codec"

    def column(self, quantity: str, windows: int | None = None) -> Column:
        """A quantity of `QUANTITIES`, of the first `windows` windows if given."""
        return column(self.tokens, quantity, windows, self.documents)

    def fields(self) -> dict[str, object]:
        """Everything that decides a number, flat; keys of nested values are joined by dots."""
        identity = self.provenance.model_dump() | {"context": self.context, "eval": self.eval}
        # Where a calibration is read, its Sigma_q is part of the origin: cells of two origins differ in it.
        identity["origin.calibration"] = identity.pop("calibration").get(self.cell.origin)
        return identity | flat(self.cell.model_dump(mode="json", exclude={"study", "label"}))


@dataclass(frozen=True, eq=False)
class Results:
    """Everything that was measured, in the plan's order."""

    cells: tuple[Measured, ...]
    runs: dict[str, BaselineRecord]
    run_tokens: dict[tuple[str, str, str | None], pl.DataFrame]
    provenance: Provenance

    def select(self, study: str, role: str | None = None, **attributes) -> list[Measured]:
        """Cells of a study by role and by attributes of their `Cell`."""
        return [
            m
            for m in self.cells
            if m.cell.study == study
            and all(getattr(m.cell, name) == value for name, value in attributes.items())
            and (role is None or m.role == role)
        ]

    def run_column(
        self, run: str, quantity: str, what: str = "plain", protocol: str | None = None, windows: int | None = None
    ) -> Column:
        """A quantity of a baseline run, of its first `windows` windows if given.

        `MissingResult` when that comparison was not made.
        """
        if (run, what, protocol) not in self.run_tokens:
            raise MissingResult(
                f"baseline run {run!r} holds no {what!r} comparison under protocol {protocol};"
                f" run `kvlab step baseline --run {run}` with --sigma and --codebooks",
                code="missing-result.comparison",
            )
        return column(self.run_tokens[run, what, protocol], quantity, windows, self.runs[run].documents.get("test"))


def column(
    tokens: pl.DataFrame, quantity: str, windows: int | None = None, documents: tuple[int, ...] | None = None
) -> Column:
    """One quantity of a token table, summed by window; `documents` are those of its windows, by number."""
    arrays = {each.name: each.to_numpy() for each in tokens.iter_columns() if each.dtype.is_numeric()}
    values = QUANTITIES[quantity](arrays).astype(np.float64)
    window, position = arrays["window"], arrays["position"]
    if windows is not None:
        chosen = window < windows
        values, window, position = values[chosen], window[chosen], position[chosen]
    return Column.of(window, position, values, documents)


def flat(data: dict, prefix: str = "") -> dict[str, object]:
    """The leaves of nested mappings, named by their path."""
    found = {}
    for key, value in data.items():
        nested = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found

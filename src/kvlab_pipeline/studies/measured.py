"""What was measured: one cell with its token rows, all cells of a model, and columns of them by window."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from kvlab.core.errors import MissingResult
from kvlab.core.recipe import CONTROLS, IDENTITY, Cell
from kvlab.core.records import BaselineRecord, CellRecord, Provenance
from kvlab.stats.bootstrap import Column

_FLIPPED = pl.col("top1_ref") != pl.col("top1_alt")
QUANTITIES = {
    "kl": pl.col("kl"),
    "delta_nll": pl.col("nll_alt") - pl.col("nll_ref"),
    "delta_nll_squared": (pl.col("nll_alt") - pl.col("nll_ref")) ** 2,
    "top1_agreement": ~_FLIPPED,
    "flips_to_wrong": _FLIPPED & (pl.col("top1_ref") == pl.col("label")),
    "flips_to_right": _FLIPPED & (pl.col("top1_alt") == pl.col("label")),
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
    if windows is not None:
        tokens = tokens.filter(pl.col("window") < windows)
    values = tokens.select(QUANTITIES[quantity].cast(pl.Float64).alias("value"))["value"]
    return Column.of(tokens["window"].to_numpy(), tokens["position"].to_numpy(), values.to_numpy(), documents)


def flat(data: dict, prefix: str = "") -> dict[str, object]:
    """The leaves of nested mappings, named by their path."""
    found = {}
    for key, value in data.items():
        nested = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found

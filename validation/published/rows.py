"""What the published files hold, as one schema: a file has cells, a cell has windows and a recipe.

One window is one published passage. The files hold no numbers per token, so the table has one row per (file,
cell, window) and `kvlab.core.records.TOKENS` becomes, per window and averaged over its scored tokens:

    nll_ref, nll_alt   log of the perplexities, nats per token
    delta_nll          nll_alt - nll_ref
    kl                 as the file has it; `kl_kind` says over what (``full`` vocabulary, or ``top_k`` symmetric)
    top1_agreement     share of scored tokens with the same top token
    abs_dlogp          mean over tokens of abs(change of the true token's log-probability), nats
"""

from __future__ import annotations

import math
from typing import Literal

import polars as pl

from kvlab.core.codec_settings import Frozen

WINDOWS = pl.Schema(
    {
        "file": pl.String,
        "cell": pl.String,
        "window": pl.Int32,
        "nll_ref": pl.Float64,
        "nll_alt": pl.Float64,
        "delta_nll": pl.Float64,
        "ppl_ref": pl.Float64,
        "ppl_alt": pl.Float64,
        "n_tokens": pl.Int32,
        "top1_agreement": pl.Float64,
        "kl": pl.Float64,
        "kl_kind": pl.String,
        "abs_dlogp": pl.Float64,
        "coded_bytes": pl.Int64,
    }
)

# What a cell is: the codec at work, the codec's place with nothing in it, an engine against another, noise.
Role = Literal["codec", "identity", "engine", "noise"]


class CellFacts(Frozen):
    """How a cell was made, as its file says; None is "not recorded", never a default.

    `engine` and `protocol` may follow from the family (the harness that writes such files knew only one);
    `stream` may follow from the cell's name. Both are named in `inferred`.
    """

    model: str | None = None
    engine: str | None = None
    protocol: str | None = None
    stream: str | None = None
    codec: str | None = None
    variance_ratio: float | None = None
    bits_k: float | None = None
    bits_v: float | None = None
    pca: str | None = None
    rank_fraction: float | None = None
    block_size: int | None = None
    skeleton: str | None = None
    share_basis_k: bool | None = None
    share_basis_v: bool | None = None
    whitening: str | None = None
    calibration: str | None = None
    placement: str | None = None
    codebook_k: str | None = None
    codebook_v: str | None = None
    n_centres_k: int | None = None
    n_centres_v: int | None = None
    outlier_threshold: float | None = None
    v_outlier_threshold: float | None = None
    boundary_layers: tuple[int, ...] | None = None
    context: int | None = None
    eval: int | None = None
    n_layers: int | None = None
    inferred: tuple[str, ...] = ()


class PassageScores(Frozen):
    """One passage of one cell. Perplexities are finite; the rest is None where not recorded."""

    window: int
    ppl_ref: float
    ppl_alt: float
    n_tokens: int | None = None
    top1: float | None = None
    kl: float | None = None
    abs_dlogp: float | None = None
    coded_bytes: int | None = None

    @property
    def change(self) -> float:
        """Relative change of perplexity, the published estimator's term."""
        return (self.ppl_alt - self.ppl_ref) / self.ppl_ref

    @property
    def delta_nll(self) -> float:
        """Nats per token."""
        return math.log(self.ppl_alt) - math.log(self.ppl_ref)


class Check(Frozen):
    """One number that the file prints, and the same number computed from the file's own rows.

    `agrees` is equality up to rounding (`checks.equal`), `printed` equality at the digits of the published tables.
    """

    file: str
    cell: str
    number: str
    stored: float | str
    ours: float | str
    agrees: bool
    printed: bool


class PublishedCell(Frozen):
    """A setting that was measured, window by window."""

    file: str
    name: str
    role: Role
    facts: CellFacts
    windows: tuple[PassageScores, ...]
    kl_kind: Literal["full", "top_k"] | None = None
    stored_verdict: str | None = None
    rule: Literal["accept", "pass"] = "accept"
    claim: str = "block codec"
    sigma: float | None = None


class LayerEffect(Frozen):
    """One layer coded alone: means over passages, the passages are not in the file."""

    layer: int
    change: float
    top1: float | None


class SingleLayers(Frozen):
    """A file of single layers (phase 3)."""

    file: str
    n_windows: int | None
    facts: CellFacts
    effects: tuple[LayerEffect, ...]


class LayerErrors(Frozen):
    """A file of codec errors by layer (phase 4): quantity -> one number per layer."""

    file: str
    n_windows: int | None
    values: dict[str, tuple[float, ...]]


class GridRow(Frozen):
    """One row of a grid: settings and means."""

    settings: dict[str, float | int | bool | str | None]
    change: float
    kl: float | None
    top1: float | None


class SettingsGrid(Frozen):
    """A file of means by setting, without passages."""

    file: str
    model: str
    rows: tuple[GridRow, ...]


class SigmaSidecar(Frozen):
    """A Sigma_q sidecar: the shape of the model and diagnostics by (layer, KV head)."""

    file: str
    n_layers: int | None
    kv_heads: int | None
    head_dim: int | None
    condition: tuple[float, ...]
    off_diagonal: tuple[float, ...]


class Contents(Frozen):
    """Everything read from one file."""

    cells: tuple[PublishedCell, ...] = ()
    layers: tuple[SingleLayers, ...] = ()
    errors: tuple[LayerErrors, ...] = ()
    grids: tuple[SettingsGrid, ...] = ()
    sigmas: tuple[SigmaSidecar, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()


def table(cells: list[PublishedCell]) -> pl.DataFrame:
    """All windows of all cells in the schema `WINDOWS`."""
    rows = [
        {
            "file": cell.file,
            "cell": cell.name,
            "window": one.window,
            "nll_ref": math.log(one.ppl_ref),
            "nll_alt": math.log(one.ppl_alt),
            "delta_nll": one.delta_nll,
            "ppl_ref": one.ppl_ref,
            "ppl_alt": one.ppl_alt,
            "n_tokens": one.n_tokens,
            "top1_agreement": one.top1,
            "kl": one.kl,
            "kl_kind": cell.kl_kind if one.kl is not None else None,
            "abs_dlogp": one.abs_dlogp,
            "coded_bytes": one.coded_bytes,
        }
        for cell in cells
        for one in cell.windows
    ]
    return pl.DataFrame(rows, schema=WINDOWS)

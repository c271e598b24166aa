"""The residual study's recipes and its result files: a table of squares, and a record beside it. Torch-free.

The study has no cells: no model runs, the codec is turned on what each engine's capture holds. A result leaves
``<engine>.parquet`` with one row per (variance_ratio, layer, stream, window) and ``<engine>.json``.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
from pydantic import Field

from kvlab.codecs.block.studied import studied_recipe, variance_ratios
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import StorageError
from kvlab.core.params import Params
from kvlab.core.recipe import DType, Engine, Recipe, StreamRecipe
from kvlab.core.records import Provenance, finite, forget, write_json, write_table
from kvlab_pipeline.studies.record import read_record

STREAMS = ("k", "v")
KEY = ("variance_ratio", "layer", "stream", "window")
# One row per coded tensor: one layer's K or V of one window's context. Errors and signals are sums of squares,
# the signal about the mean of each head; whitened: K in the metric of Sigma_q, V as it is. `bytes` is the length
# of the frame, `d_eff_sum` the kept ranks of its `n_blocks` blocks added up.
RESIDUAL = pl.Schema(
    {
        "variance_ratio": pl.Float64,
        "layer": pl.Int32,
        "stream": pl.String,
        "window": pl.Int32,
        "raw_error_sq": pl.Float64,
        "raw_signal_sq": pl.Float64,
        "whitened_error_sq": pl.Float64,
        "whitened_signal_sq": pl.Float64,
        "bytes": pl.Int64,
        "values": pl.Int64,
        "n_outliers": pl.Int64,
        "n_coefficients": pl.Int64,
        "n_blocks": pl.Int64,
        "d_eff_sum": pl.Int64,
    }
)


class RatioRecipe(Frozen):
    """The recipe of one variance ratio."""

    variance_ratio: float
    recipe_id: str
    recipe: Recipe

    def stream(self, which: str) -> StreamRecipe:
        """Its settings for K or for V."""
        return self.recipe.k if which == "k" else self.recipe.v


class RankCounts(Frozen):
    """Blocks of one layer's K or V, counted by kept rank: rank -> how many in each window."""

    variance_ratio: float
    layer: int
    stream: str
    blocks: dict[int, tuple[int, ...]]


class ResidualRecord(Frozen):
    """The JSON of one engine's capture, coded.

    Parameters
    ----------
    provenance : Provenance
        As of every result; its device is the one that the capture was made on.
    engine : Engine
        Whose capture was coded; the model ran in `dtype`, the sample is kept in bfloat16.
    captured_with : dict of str to str
        Versions of the packages that made the capture.
    origin : Engine
        Whose capture fitted what the codec reads.
    context, windows, n_layers : int
        Coded tokens of a window, windows of the capture's sample, layers; all of them were coded.
    boundary_layers : tuple of int
        Those that the studied recipe leaves uncoded.
    """

    provenance: Provenance
    engine: Engine
    dtype: DType
    captured_with: dict[str, str]
    origin: Engine
    context: int = Field(ge=1)
    windows: int = Field(ge=1)
    n_layers: int = Field(ge=1)
    boundary_layers: tuple[int, ...]
    recipes: tuple[RatioRecipe, ...]
    d_eff: tuple[RankCounts, ...]


def recipes(params: Params) -> tuple[RatioRecipe, ...]:
    """The studied recipe at every variance ratio of the decomposition, and at its own."""
    found = []
    for ratio in variance_ratios(params):
        recipe = studied_recipe(params, ratio)
        found.append(RatioRecipe(variance_ratio=ratio, recipe_id=recipe.recipe_id, recipe=recipe))
    return tuple(found)


def coded_windows(params: Params) -> int:
    """How many windows are coded: those of the capture's sample."""
    return min(params.windows.calib, params.calibration.sample)


def write_residual(path: Path | str, record: ResidualRecord, rows: pl.DataFrame) -> None:
    """Write the parquet, then the JSON beside it, whose presence marks the result as whole."""
    path = Path(path)
    forget(path)
    write_table(path.with_suffix(".parquet"), finite(rows, path).match_to_schema(RESIDUAL))
    write_json(path.with_suffix(".json"), record.model_dump(mode="json"))


def read_residual(path: Path | str) -> tuple[ResidualRecord, pl.DataFrame]:
    """Read a record and the table beside it.

    Raises
    ------
    StorageError
        A file is missing, or is not what `write_residual` leaves.
    NonFinite
        A column holds NaN or infinity.
    """
    path = Path(path)
    record = read_record(path.with_suffix(".json"), ResidualRecord, "residual")
    table = path.with_suffix(".parquet")
    try:
        rows = pl.read_parquet(table)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StorageError(f"cannot read {table}: {error}") from None
    if rows.schema != RESIDUAL:
        raise StorageError(
            f"{table} has columns {dict(rows.schema)}, expected {dict(RESIDUAL)}", code="storage.columns"
        )
    if sum(rows.null_count().row(0)):
        raise StorageError(f"{table} has empty fields; run `kvlab step residual` again", code="storage.empty-fields")
    return record, finite(rows, table)

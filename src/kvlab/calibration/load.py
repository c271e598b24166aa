"""Calibration as the cells use it: whiteners and tables, checked to belong to this model and recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab.calibration.sigma import load_whiteners
from kvlab.codec.base import StreamCalibration
from kvlab.codec.whitening import Whitener
from kvlab.errors import CalibrationMismatch
from kvlab.recipe import BlockStream, StreamRecipe, digest
from kvlab.records import file_hash, read_json


@dataclass(frozen=True)
class Calibrated:
    """Whiteners by layer, tables by stream recipe, and the hash of the files they came from."""

    whiteners: dict[int, Whitener]
    tables: dict[str, torch.Tensor]
    calibration_hash: str

    def stream(self, recipe: StreamRecipe) -> StreamCalibration | None:
        """What a codec of this stream recipe needs; None for one that needs nothing.

        Raises
        ------
        CalibrationMismatch
            No table was fitted for exactly this recipe.
        """
        if not isinstance(recipe, BlockStream):
            return None
        if recipe.codebook == "gaussian":
            return StreamCalibration(whiteners=self.whiteners, centroids=None)
        if digest(recipe) not in self.tables:
            raise CalibrationMismatch(
                f"no codebook was fitted for stream recipe {digest(recipe)} (bits {recipe.bits}, variance_ratio"
                f" {recipe.variance_ratio:g}); run `kvlab codebooks` with these parameters"
            )
        return StreamCalibration(whiteners=self.whiteners, centroids=self.tables[digest(recipe)])


def load(sigma_path: Path, codebooks_path: Path, model_hash: str) -> Calibrated:
    """Read Sigma_q and the tables.

    Raises
    ------
    CalibrationMismatch
        They belong to another model, or to different captures.
    """
    whiteners = load_whiteners(sigma_path, model_hash)
    codebooks = read_json(codebooks_path)
    if codebooks["model_hash"] != model_hash:
        raise CalibrationMismatch(
            f"{codebooks_path} was fitted on model {codebooks['model_hash']}, this model is {model_hash}"
        )
    sidecar = read_json(Path(sigma_path).with_suffix(".json"))
    if (sidecar["corpus_hash"], sidecar["calibration_source"]) != (
        codebooks["corpus_hash"],
        codebooks["origin"],
    ):
        raise CalibrationMismatch(f"{sigma_path} and {codebooks_path} come from different captures")
    return Calibrated(
        whiteners=whiteners,
        tables={t["stream_recipe_id"]: torch.tensor(t["centroids"]) for t in codebooks["tables"]},
        calibration_hash=file_hash(sigma_path, codebooks_path),
    )

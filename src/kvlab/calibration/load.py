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
    """Whiteners by layer, tables by stream recipe, the windows they saw, and the hash of their files."""

    whiteners: dict[int, Whitener]
    tables: dict[str, torch.Tensor]
    corpus_hash: str
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


def load(sigma_path: Path, codebooks_path: Path, model_hash: str, corpus_hash: str | None = None) -> Calibrated:
    """Read Sigma_q and the tables.

    Parameters
    ----------
    corpus_hash : str, optional
        Of the windows that will be scored. Their file holds the calibration windows too, and keeps both
        apart; a calibration from another file could have seen the scored text.

    Raises
    ------
    CalibrationMismatch
        They belong to another model, to different captures, or to other windows than are scored.
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
    if corpus_hash is not None and codebooks["corpus_hash"] != corpus_hash:
        raise CalibrationMismatch(
            f"{codebooks_path} was fitted on windows {codebooks['corpus_hash']}, scored are windows {corpus_hash};"
            " calibrate on the same windows file"
        )
    return Calibrated(
        whiteners=whiteners,
        tables={t["stream_recipe_id"]: torch.tensor(t["centroids"]) for t in codebooks["tables"]},
        corpus_hash=codebooks["corpus_hash"],
        calibration_hash=file_hash(sigma_path, codebooks_path),
    )

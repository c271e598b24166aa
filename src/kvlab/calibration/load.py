"""Calibration as the cells use it: fitted files, checked to belong to this model and to one another."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from kvlab.calibration.components import load_components
from kvlab.calibration.facts import read_facts
from kvlab.calibration.sigma import load_whiteners, read_sidecar
from kvlab.codec.base import StreamCalibration
from kvlab.codec.components import Components
from kvlab.codec.whitening import Whitener
from kvlab.errors import CalibrationMismatch
from kvlab.recipe import BlockStream, Conditioned, KltStream, OscarStream, Recipe, StreamRecipe, digest
from kvlab.records import file_hash

CODEBOOKS = {"model_hash": str, "corpus_hash": str, "origin": str, "tables": list}


@dataclass(frozen=True)
class Fitted:
    """The files of a calibration: what `kvlab sigma`, `kvlab codebooks` and `kvlab components` wrote.

    Without codebooks or components (None) a recipe that asks for them is refused when its codec is built
    or first used.
    """

    sigma: Path
    codebooks: Path | None = None
    components: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """Those that there are."""
        return [Path(path) for path in (self.sigma, self.codebooks, self.components) if path is not None]


@dataclass(frozen=True)
class Calibrated:
    """What was fitted, the windows that it saw, and the hash of the files.

    Parameters
    ----------
    whiteners : dict of int to Whitener
        By layer.
    tables : dict of str to Tensor
        Lloyd-Max tables by the digest of their stream recipe.
    corpus_hash, calibration_hash : str
    components : dict of str to dict of int to Components
        By stream and layer.
    """

    whiteners: dict[int, Whitener]
    tables: dict[str, torch.Tensor]
    corpus_hash: str
    calibration_hash: str
    components: dict[str, dict[int, Components]] = field(default_factory=dict)

    def stream(self, recipe: StreamRecipe, which: Literal["k", "v"]) -> StreamCalibration | None:
        """What a codec of this recipe needs for K or for V; None for one that needs nothing.

        Raises
        ------
        CalibrationMismatch
            No table was fitted for exactly this recipe.
        """
        if not needs_calibration(recipe):
            return None
        return StreamCalibration(
            whiteners=self.whiteners if which == "k" else {},  # Sigma_q weighs errors of K
            centroids=self._table(recipe),
            components=self.components.get(which, {}),
        )

    def _table(self, recipe: StreamRecipe) -> torch.Tensor | None:
        if not isinstance(recipe, BlockStream) or recipe.codebook == "gaussian":
            return None
        if digest(recipe) not in self.tables:
            raise CalibrationMismatch(
                f"no codebook was fitted for stream recipe {digest(recipe)} (bits {recipe.bits}, variance_ratio"
                f" {recipe.variance_ratio:g}); run `kvlab codebooks` with these parameters"
            )
        return self.tables[digest(recipe)]


def needed_files(recipe: Recipe) -> list[str]:
    """Files of `Fitted` that a recipe cannot do without, by field; the other files belong to a `sigma`."""
    streams, needed = (recipe.k, recipe.v), set()
    if any(needs_calibration(stream) and not _plain(stream) for stream in streams):
        needed.add("sigma")
    if any(isinstance(stream, BlockStream) and stream.codebook == "fitted" for stream in streams):
        needed.add("codebooks")
    conditioned = any(isinstance(stream, Conditioned) and stream.center for stream in streams)
    if conditioned or any(isinstance(stream, KltStream) for stream in streams) or isinstance(recipe.v, OscarStream):
        needed.add("components")
    return [name for name in ("sigma", "codebooks", "components") if name in needed]


def _plain(recipe: StreamRecipe) -> bool:
    """A block stream that reads nothing that was fitted."""
    return isinstance(recipe, BlockStream) and not recipe.whiten and recipe.codebook == "gaussian"


def needs_calibration(recipe: StreamRecipe) -> bool:
    """Whether a codec of this recipe reads anything that was fitted."""
    if isinstance(recipe, Conditioned):
        return recipe.center or recipe.whiten or isinstance(recipe, OscarStream)
    return isinstance(recipe, BlockStream | KltStream)


def load(fitted: Fitted, model_hash: str, corpus_hash: str | None = None) -> Calibrated:
    """Read Sigma_q, the tables and the components.

    Parameters
    ----------
    fitted : Fitted
        The files.
    model_hash : str
        The model that they must have been fitted on.
    corpus_hash : str, optional
        Of the windows that will be scored. Their file holds the calibration windows too, and keeps both
        apart; a calibration from another file could have seen the scored text.

    Raises
    ------
    CalibrationMismatch
        They belong to another model, to different captures, or to other windows than are scored.
    """
    whiteners = load_whiteners(fitted.sigma, model_hash)
    sidecar = read_sidecar(fitted.sigma)
    if corpus_hash is not None and sidecar["corpus_hash"] != corpus_hash:
        raise CalibrationMismatch(
            f"{fitted.sigma} was fitted on windows {sidecar['corpus_hash']}, scored are windows {corpus_hash};"
            " calibrate on the same windows file"
        )
    origin = {"corpus_hash": sidecar["corpus_hash"], "engine": sidecar["calibration_source"]}
    of_sigma = {"model_hash": model_hash, **origin, "sigma_hash": file_hash(fitted.sigma)}
    return Calibrated(
        whiteners=whiteners,
        tables={} if fitted.codebooks is None else load_tables(fitted.codebooks, model_hash, origin),
        corpus_hash=sidecar["corpus_hash"],
        calibration_hash=file_hash(*fitted.paths),
        components={} if fitted.components is None else load_components(fitted.components, of_sigma),
    )


def load_tables(path: Path, model_hash: str, origin: dict[str, str]) -> dict[str, torch.Tensor]:
    """Lloyd-Max tables by stream recipe; refused when not from this model and the capture of `origin`."""
    codebooks = read_facts(path, CODEBOOKS, "codebooks")
    if codebooks["model_hash"] != model_hash:
        raise CalibrationMismatch(f"{path} was fitted on model {codebooks['model_hash']}, this model is {model_hash}")
    if (codebooks["corpus_hash"], codebooks["origin"]) != (origin["corpus_hash"], origin["engine"]):
        raise CalibrationMismatch(f"{path} and Sigma_q come from different captures; run `kvlab codebooks` again")
    try:
        return {table["stream_recipe_id"]: torch.tensor(table["centroids"]) for table in codebooks["tables"]}
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise CalibrationMismatch(f"{path} holds a table that is none; run `kvlab codebooks` again") from None

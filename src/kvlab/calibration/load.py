"""Calibration as the cells use it: fitted files, checked to belong to this model and to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from kvlab.calibration.archive import Archive
from kvlab.calibration.archive_file import archive_identity, load_archive
from kvlab.calibration.components import FIELDS, TURNED, load_components
from kvlab.calibration.facts import read_facts
from kvlab.calibration.needs import CalibrationPiece, coded_by, pieces, reads
from kvlab.calibration.sigma import load_whiteners, read_sidecar
from kvlab.calibration.whole import Whole
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.klt import KltStream
from kvlab.codecs.shared.components import Components
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Cell, Placement, Recipe, StreamRecipe, digest
from kvlab.core.records import file_hash, fingerprint

CODEBOOKS = {"model_hash": str, "corpus_hash": str, "origin": str, "sigma_hash": str, "tables": list}
TableKey = tuple[Literal["k", "v"], Placement, str]
"""Stream, placement and digest of the stream's recipe: what a Lloyd-Max table was fitted for."""


@dataclass(frozen=True)
class FittedFiles:
    """The files of a calibration: what `kvlab step sigma`, `codebooks`, `components` and `archive` wrote.

    `rotated` is the Sigma_q of the queries after their rotary embedding. Without codebooks, components, it or the
    archive (None) a recipe that asks for them is refused when its codec is built or first used.
    """

    sigma: Path
    codebooks: Path | None = None
    components: Path | None = None
    rotated: Path | None = None
    archive: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """Those that there are."""
        named = (self.sigma, self.codebooks, self.components, self.rotated, self.archive)
        return [Path(path) for path in named if path is not None]


@dataclass(frozen=True)
class Calibrated:
    """What was fitted, the windows that it saw, and the hash of the files.

    Parameters
    ----------
    whiteners, rotated : dict of int to Whitener
        By layer; for K before its rotary embedding, and after it.
    tables : dict of TableKey to Tensor
        Lloyd-Max tables.
    origin : str
        The engine whose capture was fitted.
    corpus_hash, sigma_hash, calibration_hash : str
        Of the windows, of the Sigma_q file, and of all files together.
    components : dict of str to dict of int to Components
        By stream and layer; K before its rotary embedding.
    turned : dict of int to Components
        By layer, of K after its rotary embedding less its mean by position (`codecs.shared.turning`).
    own : dict
        What codecs fitted by themselves, by stream and codec, and by layer.
    spectra : dict of tuple of str and int to Tensor
        By stream and layer the variances of components; those of `components` where nothing else is said.
    archive : Archive or None
        The codec of whole caches, where one was fitted.
    whole : dict of str to Whole
        Those of other people, by name.
    biases : dict of tuple of str and Placement to dict of int to Tensor
        By stream and placement, and by layer, float32 [kv_heads, head_dim]; V is ``pre_rope``.
    outputs : dict of int to Tensor
        By layer, second moments of what attention makes of V, float32 [kv_heads, head_dim, head_dim].
    """

    whiteners: dict[int, Whitener]
    tables: dict[TableKey, torch.Tensor]
    origin: str
    corpus_hash: str
    sigma_hash: str
    calibration_hash: str
    components: dict[str, dict[int, Components]] = field(default_factory=dict)
    rotated: dict[int, Whitener] = field(default_factory=dict)
    turned: dict[int, Components] = field(default_factory=dict)
    own: dict[tuple[str, str], dict[int, Any]] = field(default_factory=dict)
    spectra: dict[tuple[Literal["k", "v"], int], torch.Tensor] = field(default_factory=dict)
    archive: Archive | None = None
    whole: dict[str, Whole] = field(default_factory=dict)
    biases: dict[tuple[Literal["k", "v"], Placement], dict[int, torch.Tensor]] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.spectra:
            found = ((stream, layer, one) for stream in "kv" for layer, one in self.components.get(stream, {}).items())
            whole = (each for each in found if isinstance(each[2], Components))  # a decoder's file holds other things
            self.spectra.update({(stream, layer): one.variance for stream, layer, one in whole})

    def stream(
        self,
        recipe: StreamRecipe,
        which: Literal["k", "v"],
        placement: Placement = "pre_rope",
        by_position: bool = False,
    ) -> StreamCalibration | None:
        """What a codec of this recipe reads for K or for V, and nothing else; None for one that reads nothing.

        Parameters
        ----------
        recipe : StreamRecipe
            Of the stream.
        which : {"k", "v"}
            Which one it is.
        placement : {"pre_rope", "post_rope"}
            Whether K is coded before or after its rotary embedding.
        by_position : bool
            Whether who asks gives the codec K after its rotary embedding as `codecs.shared.turning` means it, for
            which it has to know the position of each token. `klt` has components of that K and of no other.

        Raises
        ------
        CalibrationMismatch
            No table was fitted for exactly this recipe at this placement, or the recipe reads components,
            which are those of K before its rotary embedding, for K after it.
        """
        recipe = coded_by(recipe)
        due = reads(recipe, which)
        if not due:
            return None
        after = (which, placement) == ("k", "post_rope")
        turned = after and by_position and isinstance(recipe, KltStream)
        if turned and not self.turned:
            raise CalibrationMismatch(
                "the calibration holds no components of K after its rotary embedding; make one with kvlab calibrate"
                " --rotary after, or run `kvlab step components` again",
                code="calibration.not-turned",
            )
        if {"components", "own"} & {*due} and after and not turned:
            raise CalibrationMismatch(
                f"codec {recipe.codec!r} reads components of K, which are fitted pre_rope only; with placement"
                " post_rope use a codec without them, such as block, or int without center; rotary: after of klt is"
                " read by kvlab.Cache and vLLM's coded pages (KVLAB_PAGES) alone, so give rotary: before",
                code="calibration.pre-rope-only",
            )
        return StreamCalibration(
            whiteners=self.metric(placement) if "whitener" in due else {},
            centroids=self._table(recipe, which, placement) if "table" in due else None,
            components=(self.turned if turned else self.components.get(which, {})) if "components" in due else {},
            own=self.own.get((which, recipe.codec), {}) if "own" in due else {},
            stream=which,
            spectra=self._spectra(placement) if "spectra" in due else {},
            biases=self.biases.get((which, placement if which == "k" else "pre_rope"), {}) if "bias" in due else {},
            outputs=self.outputs if "outputs" in due else {},
        )

    def whole_of(self, recipe: Recipe) -> Archive | Whole:
        """The fitted codec of whole caches that a recipe names; `CalibrationMismatch` where it was not fitted."""
        codec = recipe.k.codec
        found = self.archive if codec == "archive" else self.whole.get(codec)
        if found is None:
            raise CalibrationMismatch(
                f"the calibration was not fitted for {codec}; name the file of `kvlab step archive` with --archive, or"
                " calibrate it for this recipe with kvlab calibrate",
                code="calibration.not-fitted",
            )
        return found

    def fingerprints(self, cell: Cell) -> dict[str, str]:
        """Digests of everything fitted that the codecs of a cell read, by the name of the piece."""
        return {name: fingerprint(*(x.cpu().numpy() for x in self._tensors(p))) for name, p in pieces(cell).items()}

    def _tensors(self, piece: CalibrationPiece) -> tuple[torch.Tensor, ...]:
        if piece.kind == "table":
            return (self.tables[piece.stream, piece.placement, piece.place],)
        if piece.kind == "whitener":
            whitener = self.metric(piece.placement)[piece.place]
            return whitener.chol, whitener.inv_chol
        if piece.kind == "own":
            codec, layer = str(piece.place).split("/")
            return tuple(vars(self.own[piece.stream, codec][int(layer)]).values())
        if piece.kind == "whole":
            return tuple(self.whole[str(piece.place)].tensors.values())
        if piece.kind == "bias":
            return (self.biases[piece.stream, piece.placement][int(piece.place)],)
        if piece.kind == "outputs":
            return (self.outputs[int(piece.place)],)
        if piece.kind == "archive":
            return tuple(self.archive.tensors.values())
        if piece.kind == "spectra":
            return tuple(variance for _, variance in sorted(self._spectra(piece.placement).items()))
        found = self.turned if piece.placement == "post_rope" else self.components[piece.stream]
        return tuple(getattr(found[int(piece.place)], name) for name in FIELDS)

    def _spectra(self, placement: Placement) -> dict[tuple[Literal["k", "v"], int], torch.Tensor]:
        """Those of K at a placement and of V, of K first, from the first layer on."""
        if placement == "pre_rope":
            return self.spectra
        whole = {("k", layer): one.variance for layer, one in self.turned.items() if isinstance(one, Components)}
        return dict(sorted((self.spectra | whole).items()))

    def metric(self, placement: Placement) -> dict[int, Whitener]:
        """The whiteners of K at a placement, by layer."""
        return self.whiteners if placement == "pre_rope" else self.rotated

    def _table(self, recipe: StreamRecipe, which: Literal["k", "v"], placement: Placement) -> torch.Tensor:
        key = (which, placement if which == "k" else "pre_rope", digest(recipe))
        if key not in self.tables:
            raise CalibrationMismatch(
                f"no codebook was fitted for {which.upper()} {placement}, stream recipe {digest(recipe)} (bits"
                f" {recipe.bits}, variance_ratio {recipe.variance_ratio:g}); run `kvlab step codebooks` with these"
                " parameters",
                code="calibration.no-codebook",
            )
        return self.tables[key]


def load(
    fitted: FittedFiles, model_hash: str, corpus_hash: str | None = None, info: ModelInfo | None = None
) -> Calibrated:
    """Read Sigma_q, the tables, the components and the codec of whole caches.

    Parameters
    ----------
    fitted : FittedFiles
        The files.
    model_hash : str
        The model that they must have been fitted on.
    corpus_hash : str, optional
        Of the windows that will be scored. Their file holds the calibration windows too, and keeps both
        apart; a calibration from another file could have seen the scored text.
    info : ModelInfo, optional
        The model itself, of whose weights a codec of whole caches reads some; without, none is read.

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
            " calibrate on the same windows file",
            code="calibration.other-windows",
        )
    sigma_hash = file_hash(fitted.sigma)
    origin = {"corpus_hash": sidecar["corpus_hash"], "engine": sidecar["calibration_source"]}
    of_sigma = {"model_hash": model_hash, **origin, "sigma_hash": sigma_hash}
    rotated = {} if fitted.rotated is None else load_rotated(fitted.rotated, of_sigma)
    archive = None if None in (fitted.archive, info) else load_archive(fitted.archive, of_sigma, info)
    components = {} if fitted.components is None else load_components(fitted.components, of_sigma)
    return Calibrated(
        whiteners=whiteners,
        tables={} if fitted.codebooks is None else load_tables(fitted.codebooks, of_sigma, fitted.rotated),
        origin=origin["engine"],
        corpus_hash=sidecar["corpus_hash"],
        sigma_hash=sigma_hash,
        calibration_hash=file_hash(*fitted.paths),
        components={stream: found for stream, found in components.items() if stream != TURNED},
        rotated=rotated,
        turned=components.get(TURNED, {}),
        archive=archive,
    )


def by_origin(
    sigmas: Sequence[Path],
    codebooks: Sequence[Path] = (),
    components: Sequence[Path] = (),
    rotated: Sequence[Path] = (),
    archive: Sequence[Path] = (),
) -> dict[str, FittedFiles]:
    """Files of calibrations on one or several engines' captures, put together by the engine that each names.

    Raises
    ------
    CalibrationMismatch
        Two files of a kind are of one engine's capture, or a file belongs to no given Sigma_q.
    """
    named: dict[str, dict[str, Path]] = {}
    kinds = {
        "sigma": (sigmas, lambda path: read_sidecar(path)["calibration_source"]),
        "codebooks": (codebooks, lambda path: read_facts(path, CODEBOOKS, "codebooks")["origin"]),
        "components": (
            components,
            lambda path: read_facts(path.with_suffix(".json"), {"engine": str}, "components")["engine"],
        ),
        "rotated": (rotated, lambda path: read_sidecar(path)["calibration_source"]),
        "archive": (archive, lambda path: archive_identity(path)["engine"]),
    }
    for kind, (files, origin_of) in kinds.items():
        for path in files:
            origin = origin_of(path)
            known = named.setdefault(origin, {})
            if kind in known:
                raise CalibrationMismatch(
                    f"{path} is a second one on {origin}, beside {known[kind]}; name one",
                    code="calibration.second-file",
                )
            known[kind] = path
    for origin, files in named.items():
        if "sigma" not in files:
            raise CalibrationMismatch(
                f"{next(iter(files.values()))} was fitted on {origin}, and no Sigma_q of {origin} is named with"
                " --sigma",
                code="calibration.no-sigma",
            )
    return {origin: FittedFiles(**files) for origin, files in named.items()}


def load_rotated(path: Path, of_sigma: dict[str, str]) -> dict[int, Whitener]:
    """Whiteners of K after its rotary embedding; refused when they are none, or belong to another Sigma_q."""
    sidecar = read_sidecar(path)
    if sidecar.get("placement") != "post_rope":
        raise CalibrationMismatch(
            f"{path} is no Sigma_q of rotated queries; name the file ending in -post_rope",
            code="calibration.not-rotated",
        )
    if (sidecar["corpus_hash"], sidecar["calibration_source"]) != (of_sigma["corpus_hash"], of_sigma["engine"]):
        raise CalibrationMismatch(
            f"{path} and Sigma_q come from different captures; run `kvlab step sigma` again",
            code="calibration.other-capture",
        )
    if (sidecar.get("sigma_hash"), sidecar.get("file_hash")) != (of_sigma["sigma_hash"], file_hash(path)):
        raise CalibrationMismatch(
            f"{path} was not written with this Sigma_q; run `kvlab step sigma` again", code="calibration.other-sigma"
        )
    return load_whiteners(path, of_sigma["model_hash"])


def load_tables(path: Path, of_sigma: dict[str, str], rotated: Path | None) -> dict[TableKey, torch.Tensor]:
    """Lloyd-Max tables; refused when not from this model, this capture and this Sigma_q, rotated or not."""
    codebooks = read_facts(path, CODEBOOKS, "codebooks")
    model_hash = of_sigma["model_hash"]
    if codebooks["model_hash"] != model_hash:
        raise CalibrationMismatch(
            f"{path} was fitted on model {codebooks['model_hash']}, this model is {model_hash}",
            code="calibration.other-model",
        )
    if (codebooks["corpus_hash"], codebooks["origin"]) != (of_sigma["corpus_hash"], of_sigma["engine"]):
        raise CalibrationMismatch(
            f"{path} and Sigma_q come from different captures; run `kvlab step codebooks` again",
            code="calibration.other-capture",
        )
    if codebooks["sigma_hash"] != of_sigma["sigma_hash"]:
        raise CalibrationMismatch(
            f"{path} was fitted with another Sigma_q; run `kvlab step codebooks` again", code="calibration.other-sigma"
        )
    if None not in (rotated, turned := codebooks.get("rotated_hash")) and turned != file_hash(rotated):
        raise CalibrationMismatch(
            f"{path} was fitted with another Sigma_q than {rotated}; run `kvlab step codebooks` again",
            code="calibration.other-sigma",
        )
    try:
        return {
            (table["stream"], table["placement"], table["stream_recipe_id"]): torch.tensor(table["centroids"])
            for table in codebooks["tables"]
        }
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise CalibrationMismatch(
            f"{path} holds a table that is none; run `kvlab step codebooks` again", code="calibration.not-a-table"
        ) from None
